"""The batch program: a file of requests in, a file of answers out, one line for each line.

Owns the names of the package. A line that fails, fails alone and with its number.
"""

from pagedjax.batch_job.job import Summary, run_batch
from pagedjax.batch_job.program import guarded_main, main

__all__ = ["Summary", "guarded_main", "main", "run_batch"]
