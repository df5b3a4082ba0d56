"""Other engines beside pagedjax in one benchmark (`scripts/bench_engine.py --compare`).

`worker`, what it imports (`drive`, `orphans`) and the `*_peer` modules (with `installed`) run in a
peer's own Python, 3.10 or newer: they import the standard library, that peer's package and nothing
else. The others run in pagedjax' Python and import no peer.
"""
