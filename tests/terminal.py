"""A terminal of so many columns: what a person sees of a stream that moves the cursor."""

from __future__ import annotations

import io
import re

_TOKEN = re.compile(r"\x1b\[([0-9;]*)([A-Za-z])|(.|\n)", re.DOTALL)


class Terminal(io.StringIO):
    """Takes the place of standard error."""

    def __init__(self, columns: int = 80) -> None:
        super().__init__(newline="")
        self.columns = columns

    def isatty(self) -> bool:
        return True

    def screen(self) -> list[str]:
        """The lines, without colours, as they stand now."""
        rows: list[list[str]] = [[]]
        at, column = 0, 0
        for number, command, char in _TOKEN.findall(self.getvalue()):
            if command == "A":
                at = max(0, at - int(number or 1))
            elif command not in ("", "m"):
                raise AssertionError(f"this terminal does not know {command}")
            elif char == "\n":
                at, column = at + 1, 0  # as a terminal that adds the carriage return
            elif char == "\r":
                column = 0
            elif char:
                if column == self.columns:
                    at, column = at + 1, 0
                rows.extend([] for _ in range(at + 1 - len(rows)))
                row = rows[at]
                row.extend(" " * (column + 1 - len(row)))
                row[column] = char
                column += 1
        return ["".join(row).rstrip() for row in rows]
