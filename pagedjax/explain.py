"""What happened to a request, in words: a timeline for one, a table for all.

Owns the sentences and the columns. What they say was found by `history`.
"""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

from pagedjax.errors import PagedJaxError
from pagedjax.history import Fact, History, Miss, Story, Wait

WIDTH = 100  # columns
NUM_REASONS = 4  # of a wait, those of the most steps
NUM_NEAR = 3  # names shown for one that is not in the log


class UnknownRequestError(PagedJaxError, LookupError):
    """The log knows no request of this id; the message has the nearest ones."""


def explain(history: History, request_id: str) -> str:
    """The timeline of a request, given by its id or label, in lines of at most 100 columns.

    Raises:
      UnknownRequestError: the log has no such request.
    """
    stories = [story for story in history.stories if request_id in (story.name, story.request_id)]
    if not stories:
        known = list(dict.fromkeys(story.name for story in history.stories))
        near = difflib.get_close_matches(request_id, known, NUM_NEAR, cutoff=0.5)
        near += [name for name in known if request_id in name and name not in near]
        hint = f" Did you mean {' or '.join(near[:NUM_NEAR])}?" if near else ""
        raise UnknownRequestError(
            f"no request {request_id!r} among the {len(known)} of this log.{hint}"
        )
    return "\n\n".join(_timeline(history, story) for story in stories)


def overview(history: History) -> str:
    """A line for each request, and totals."""
    rows = [_row(story) for story in history.stories]
    heads = ("request", "arrived", "waited", "prompt", "cached", "output", "gave way", "ended")
    widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]
    widths[0] = min(widths[0], 36)
    lines = [_columns(heads, widths), *(_columns(row, widths) for row in rows)]
    return "\n".join([*lines, "", *_totals(history)])


# ------------------------------------------------------------------------------------- one request


def _timeline(history: History, story: Story) -> str:
    lines = [
        *_wrapped(_headline(story)),
        *(line for text in _summary(story) for line in _wrapped(text)),
    ]
    lines += ["", f"{'seconds':>9}  {'step':>6}  what"]
    for fact in story.facts:
        prefix = f"{fact.at.seconds:9.3f}  {fact.at.step:6}  "
        text = _WORDS[fact.kind](history, story, fact)
        if story.num_samples > 1 and fact.kind != "added":
            text = f"sample {fact.sample}: {text}"
        lines += textwrap.wrap(
            text, WIDTH, initial_indent=prefix, subsequent_indent=" " * len(prefix)
        )
    if not story.is_over:
        lines.append(f"{history.now.seconds:9.3f}  {history.now.step:6}  the log ends here")
    return "\n".join(lines)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ")


def _headline(story: Story) -> str:
    samples = f", {story.num_samples} samples" if story.num_samples > 1 else ""
    ended = " and ".join(dict.fromkeys(story.reasons)) or "not ended"
    return (
        f"{story.name}: {_count(len(story.tokens), 'prompt token')}{samples}, "
        f"{_count(story.counts.num_output_tokens, 'token')} generated, {ended}"
    )


def _summary(story: Story) -> list[str]:
    took = (story.ended.seconds if story.ended else 0.0) - story.added.seconds
    who = "its samples " if story.num_samples > 1 else ""
    texts = [
        f"{who}waited {_steps(story.counts.num_wait_steps, story.counts.wait_seconds)} in all"
        + (f", took {took:.3f} s" if story.ended else "")
        + f"; {story.counts.num_cached_tokens} of {_count(len(story.tokens), 'prompt token')} came "
        f"from the prefix cache"
    ]
    parts = [
        _count(story.counts.num_preemptions, "preemption") if story.counts.num_preemptions else "",
        _count(story.counts.num_restarts, "restart") if story.counts.num_restarts else "",
        f"{_count(story.counts.num_recomputed_tokens, 'token')} computed again"
        if story.counts.num_recomputed_tokens
        else "",
        f"{_count(story.counts.num_pages_out, 'page')} moved to the host"
        if story.counts.num_pages_out
        else "",
        f"{_count(story.counts.num_pages_in, 'page')} moved back"
        if story.counts.num_pages_in
        else "",
        f"{_count(story.counts.num_copies, 'page')} copied before writing"
        if story.counts.num_copies
        else "",
    ]
    said = [part for part in parts if part]
    return [*texts, ", ".join(said)] if said else texts


def _added(history: History, story: Story, fact: Fact) -> str:
    waiting, running = fact.details["num_waiting"], fact.details["num_running"]
    extras = [
        f"priority {story.document['priority']}" if story.document.get("priority") else "",
        "with a cache salt" if story.salt else "",
    ]
    said = "".join(f", {extra}" for extra in extras if extra)
    del history
    return (
        f"arrived as number {story.arrival}{said}; {_count(waiting, 'request')} waited already and "
        f"{_count(running, 'sequence')} ran"
    )


def _admitted(history: History, story: Story, fact: Fact) -> str:
    details = fact.details
    texts: list[str] = []
    if details["num_steps"] > 0:
        waits = history.waits(story, details["since"], fact.at)
        waited = f"waited {_steps(details['num_steps'], details['seconds'])}"
        why = "; ".join(_waited(wait) for wait in waits[:NUM_REASONS])
        rest = sum(wait.num_steps for wait in waits[NUM_REASONS:])
        why += f"; {_count(rest, 'step')} for other reasons" if rest else ""
        texts.append(f"{waited}: {why}." if why else f"{waited}.")
    start = "starts" if details["is_first"] else "goes on"
    num_prompt, found = len(story.tokens), details["num_tokens"]
    if found == 0:
        texts.append(f"{start} from nothing" if details["is_first"] else "starts from nothing")
    else:
        of = f" of {_count(num_prompt, 'prompt token')}" if details["is_first"] else ""
        texts.append(
            f"{start} with {found}{of or ' tokens'}: {_where(details)}{_whose(story, details)}"
        )
    if details["num_recomputed"]:
        texts.append(f"{_count(details['num_recomputed'], 'token')} to compute again")
    if details["miss"] is not None:
        texts.append(f"first miss: {_missed(details['miss'])}")
    return "; ".join(texts).replace(".; ", ". ")


def _where(details: dict[str, Any]) -> str:
    device, host = details["num_device"], details["num_host"]
    parts = [
        f"{_count(device, 'page')} on the device" if device else "",
        f"{_count(host, 'page')} brought in from the host" if host else "",
    ]
    return " and ".join(part for part in parts if part)


def _whose(story: Story, details: dict[str, Any]) -> str:
    owners = {k: n for k, n in details["sources"].items() if k != story.name}
    if not owners:
        return ""
    most = sorted(owners.items(), key=lambda item: -item[1])[:NUM_NEAR]
    more = f" and {len(owners) - len(most)} others" if len(owners) > len(most) else ""
    num_theirs = sum(owners.values())
    part = "" if num_theirs == details["num_device"] + details["num_host"] else f"{num_theirs} "
    return f" ({part}computed for " + ", ".join(name for name, _ in most) + more + ")"


def _waited(wait: Wait) -> str:
    head = "first in the queue" if wait.is_head else f"behind {wait.head}, which was first"
    return f"{_count(wait.num_steps, 'step')} {head}: {_blocked(wait)}"


def _blocked(wait: Wait) -> str:
    match wait.reason:
        case "pages":
            kept = f", {wait.reserved} to be kept for what ran" if wait.reserved else ""
            return f"it needed {_count(wait.needed, 'page')} and {_were_free(wait.free)}{kept}"
        case "slots":
            if wait.needed == 1 and wait.free == 0:
                return "all slots were taken"
            return (
                f"it needed {_count(wait.needed, 'slot')} and {_were_free(wait.free)}, "
                f"{wait.reserved} to be kept for samples to come"
            )
        case "tokens":
            return "the tokens of each step were given to others"
        case "rows":
            return "the sampling rows of each step were given to others"
        case "prefix":
            return f"{wait.whose} was computing the first {wait.needed} tokens of its prompt"
        case "preempting":
            return "nobody is admitted while running ones give way"
        case reason:
            return reason


def _were_free(count: int) -> str:
    return f"{count or 'none'} {'was' if count == 1 else 'were'} free"


def _missed(miss: Miss) -> str:
    tokens = f"tokens {miss.first_token} to {miss.last_token}"
    match miss.why:
        case "new":
            return f"{tokens} were in no earlier prompt"
        case "off":
            return f"{tokens}, because prefix caching is off"
        case "logprobs":
            return f"{tokens}, because prompt logprobs need every position computed"
        case "pending":
            return f"{tokens} were still being computed for {miss.whose}"
        case "evicted":
            return f"{tokens} were computed for {miss.whose} and evicted in step {miss.step}"
        case "reset":
            return (
                f"{tokens}, computed for {miss.whose}, went with the reset after step {miss.step}"
            )
        case "salt":
            return f"{tokens} were computed for {miss.whose}, under another cache salt"
        case _:
            return f"{tokens}, computed for {miss.whose} in step {miss.step}, were not kept"


def _prompt_done(history: History, story: Story, fact: Fact) -> str:
    del history, story, fact
    return "the last of its prompt runs in this step"


def _preempted(history: History, story: Story, fact: Fact) -> str:
    details = fact.details
    del history
    if not details["needed"]:
        return "gives its pages up while it waits for the other beams"
    who = "it" if details["needer"] in ("", story.name) else details["needer"]
    if details["is_sibling"]:
        who = f"sample {details['needer_sample']}"
    why = f"{who} needed {_count(details['needed'], 'page')} and {_were_free(details['free'])}"
    gives = f"gives up {_count(details['num_pages'], 'page')} with "
    gives += _count(details["num_tokens"], "token")
    if details["mode"] == "recompute":
        return f"preempted, to be computed again: {why}; {gives}"
    rest = "" if details["num_moved"] == details["num_pages"] else " (the others need no move)"
    return f"preempted by swap: {why}; {gives}, {details['num_moved']} move to the host{rest}"


def _restarted(history: History, story: Story, fact: Fact) -> str:
    details = fact.details
    del history, story
    why = {
        "dropped": f"step {details['step']} broke off",
        "lost": "pages on the host were lost",
        "turned": "its beam ended and it goes on from another one",
        "reset_prefix_cache": "the prefix cache was reset under it",
    }.get(details["cause"], details["cause"].replace("_", " "))
    return f"starts over, because {why}: gives up {_count(details['num_tokens'], 'token')}"


def _copied(history: History, story: Story, fact: Fact) -> str:
    del history, story
    return (
        f"page {fact.details['source']} is copied to {fact.details['target']} before it is "
        "written: another sequence shares it"
    )


def _ended(history: History, story: Story, fact: Fact) -> str:
    del history, story
    error = f": {fact.details['error']}" if fact.details["error"] else ""
    tokens = _count(fact.details["num_tokens"], "token")
    return f"ended ({fact.details['reason']}) after {tokens}{error}"


_WORDS: dict[str, Callable[[History, Story, Fact], str]] = {
    "added": _added,
    "admitted": _admitted,
    "prompt done": _prompt_done,
    "preempted": _preempted,
    "restarted": _restarted,
    "copied": _copied,
    "ended": _ended,
}


# ------------------------------------------------------------------------------------ all requests


def _row(story: Story) -> tuple[str, ...]:
    gave_way = story.counts.num_preemptions + story.counts.num_restarts
    ended = " and ".join(dict.fromkeys(story.reasons))
    return (
        story.name if len(story.name) <= 36 else story.name[:33] + "...",
        f"{story.added.seconds:.3f}",
        f"{story.counts.wait_seconds:.3f}",
        str(len(story.tokens)),
        str(story.counts.num_cached_tokens),
        str(story.counts.num_output_tokens),
        str(gave_way or "-"),
        ended or "-",
    )


def _columns(cells: Seq[str], widths: Seq[int]) -> str:
    first, last = cells[0].ljust(widths[0]), cells[-1]
    middle = [cell.rjust(width) for cell, width in zip(cells[1:-1], widths[1:-1], strict=True)]
    return "  ".join([first, *middle, last]).rstrip()


def _totals(history: History) -> list[str]:
    stories = history.stories
    sums = {
        name: sum(getattr(story.counts, name) for story in stories)
        for name in (
            "num_cached_tokens", "num_output_tokens", "num_preemptions",
            "num_restarts", "num_recomputed_tokens", "num_pages_out", "num_pages_in", "num_copies",
        )
    }  # fmt: skip
    num_ended = sum(story.is_over for story in stories)
    num_prompt = sum(len(story.tokens) for story in stories)
    preemptions = _count(sums["num_preemptions"], "preemption")
    restarts = _count(sums["num_restarts"], "restart")
    return [
        f"{_count(len(stories), 'request')}, {num_ended} ended, in "
        f"{_steps(history.now.step, history.now.seconds)}",
        f"{num_prompt} prompt tokens, {sums['num_cached_tokens']} of them cached; "
        f"{sums['num_output_tokens']} tokens generated",
        f"{preemptions}, {restarts}, {sums['num_recomputed_tokens']} tokens computed again",
        f"pages: {sums['num_pages_out']} moved to the host, {sums['num_pages_in']} moved back, "
        f"{sums['num_copies']} copied before writing",
    ]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _steps(number: int, seconds: float) -> str:
    return f"{_count(number, 'step')} ({seconds:.3f} s)"
