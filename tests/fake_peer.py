"""A worker that computes nothing, for tests of who asks it: `python fake_peer.py BEHAVIOUR LOG`.

Speaks the protocol of `scripts/peers/worker.py`; answers with tokens that count up and times a
millisecond apart. LOG gets a line for each run: who ran, and the first token of its first prompt.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path


def main() -> None:
    """BEHAVIOUR is a name, and after a colon what goes wrong in which run."""
    name, _, fault = sys.argv[1].partition(":")
    log = Path(sys.argv[2])
    runs = 0
    for line in sys.stdin:
        message = json.loads(line)
        if message["do"] == "run":
            runs += 1
            first = message["requests"][0]["prompt_ids"][0]
            with log.open("a") as file:
                file.write(f"{name} {first}\n")
            told = answer(message["requests"], 2.0 if name == "slow" else 1.0, fault, runs)
        else:
            told = {"ok": {"version": "1", "options": message.get("settings", {})}}
        print(json.dumps(told), flush=True)


def answer(requests: list[dict[str, object]], seconds: float, fault: str, run: int) -> object:
    """What it says, or does instead, in this run."""
    if fault == f"error{run}":
        return {"error": "WrongAnswer: request 0 must get 4 tokens. Got 3."}
    if fault == f"crash{run}":
        print("out of\nmemory", file=sys.stderr, flush=True)
        sys.exit(7)
    if fault == f"hang{run}":
        time.sleep(3600)
    if fault == "spin":
        threading.Thread(target=spin, daemon=True).start()
    records = []
    for request in requests:
        tokens = list(range(int(str(request["max_new"]))))
        if fault == "other":
            tokens[-1] = 1000
        times = [0.001 * (i + 1) for i in range(len(tokens))]
        records.append({"arrival_s": request["arrival_s"], "tokens": tokens, "times": times})
    return {"ok": {"seconds": seconds * run, "requests": records}}


def spin() -> None:
    """A thread pool that waits busily."""
    while True:
        pass


if __name__ == "__main__":
    main()
