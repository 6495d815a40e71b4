"""Tables as text."""


def print_table(rows: list[list[str]]) -> None:
    """The first column starts on the left, the others end on the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        print("  ".join((first.ljust(widths[0]), *cells)))
