"""The same job on many engines, through Ray Data.

    feed (reads) -> workers (an engine each) -> fleet (one pipeline at a time) -> job (what is left)
    roster: who lives, and what was begun

The driver keeps all that a job owns: manifest, journal, lock, order, signals, progress. Workers
only answer lines. Ray is imported when a job asks for it, and by no module at import.
"""

from pagedjax.batch_job.on_ray.cluster import LOCAL, connect
from pagedjax.batch_job.on_ray.fleet import Fleet, WorkerPlan
from pagedjax.batch_job.on_ray.guard import guarded
from pagedjax.batch_job.on_ray.job import run_on_fleet

__all__ = ["LOCAL", "Fleet", "WorkerPlan", "connect", "guarded", "run_on_fleet"]
