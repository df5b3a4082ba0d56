"""The pipeline's source: lines that are still to be answered, in groups, with their identity.

Runs in one task on the driver's machine, because that is where the input is. A group is a row; one
that is lost is read again, with the same lines in it.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pagedjax.batch_job.entry import read_line
from pagedjax.batch_job.ids import CustomIds
from pagedjax.batch_job.source import open_source

GROUP_BYTES = 2**20  # a group of long lines is closed early
POLL_SECONDS = 0.05  # between two looks for the list of lines

type Group = dict[str, list[Any]]  # numbers, custom_ids, lines: of equal length


def groups(lines: Iterator[bytes], todo: bytes, size: int) -> Iterator[Group]:
    """The lines that are to be answered.

    Args:
      lines: all of the input.
      todo: not zero at the number of each line that is wanted; it may be shorter than the input.
      size: lines of a group.
    """
    ids, num_bytes = CustomIds(), 0
    group: Group = {"numbers": [], "custom_ids": [], "lines": []}
    for number, raw in enumerate(lines, 1):
        found = read_line(number, raw, ids)
        if found is None or number >= len(todo) or not todo[number]:
            continue
        group["numbers"].append(number)
        group["custom_ids"].append(found[0].custom_id)
        group["lines"].append(raw)
        num_bytes += len(raw)
        if len(group["numbers"]) >= size or num_bytes >= GROUP_BYTES:
            yield group
            group, num_bytes = {"numbers": [], "custom_ids": [], "lines": []}, 0
    if group["numbers"]:
        yield group


def datasource(path: Path, size: int, roster: Any) -> Any:
    """A source for `ray.data.read_datasource`, of one task whose rows are groups."""
    data = importlib.import_module("ray.data")
    metadata = importlib.import_module("ray.data.block").BlockMetadata
    where = os.path.abspath(path)

    class LineFeed(data.Datasource):
        def estimate_inmemory_data_size(self) -> int | None:
            return None

        def get_name(self) -> str:
            return "Lines"

        def get_read_tasks(self, *_: Any, **__: Any) -> list[Any]:
            unknown = metadata(num_rows=None, size_bytes=None, input_files=None, exec_stats=None)
            return [data.ReadTask(lambda: _tables(where, size, roster), unknown)]

    return LineFeed()


def _tables(path: str, size: int, roster: Any) -> Iterator[Any]:
    ray, arrow = importlib.import_module("ray"), importlib.import_module("pyarrow")
    schema = arrow.schema({
        "numbers": arrow.list_(arrow.int64()),
        "custom_ids": arrow.list_(arrow.string()),
        "lines": arrow.list_(arrow.binary()),
    })  # fmt: skip
    while (published := ray.get(roster.todo.remote())) is None:
        time.sleep(POLL_SECONDS)
    (todo, stamp), trouble = published, None
    try:
        with ExitStack() as stack:
            source = open_source(path, stack)
            if source.stamp != stamp:
                trouble = "the input was written while it was read"
                return
            for group in groups(source.lines(), todo, size):
                yield arrow.table({name: [group[name]] for name in schema.names}, schema=schema)
    except Exception as error:
        trouble = f"the input cannot be read: {error}"
    finally:
        ray.get(roster.fed.remote(trouble))
