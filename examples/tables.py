"""Prints tables as text."""


def print_table(rows: list[list[str]]) -> None:
    """Prints rows with the first column aligned to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        print("  ".join((first.ljust(widths[0]), *cells)))
