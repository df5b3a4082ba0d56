"""What an event log says of each request: when it waited and for what, where its pages came from.

`reader` follows the events, `story` is what it finds of a request, `waits` knows why the queue
stood still, `sequences` who runs, and `contents` whose tokens a page holds. Says only what events
prove; never imports JAX. Knows nothing of words or columns.
"""

from pagedjax.history.reader import History
from pagedjax.history.story import Counts, Fact, Miss, Moment, Story, Wait

__all__ = ["Counts", "Fact", "History", "Miss", "Moment", "Story", "Wait"]
