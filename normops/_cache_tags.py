"""What torch.compile has on disk is found again by keys, which have the tags of ``torch.compiler.config``."""

import torch


def add_tag(tag: str) -> None:
    """Keeps those of others."""
    tags = _tags()
    if tag not in tags:
        _set_tags([*tags, tag])


def remove_tag(tag: str) -> None:
    """Takes back :func:`add_tag`."""
    _set_tags([other for other in _tags() if other != tag])


def _tags() -> list[str]:
    return [tag for tag in torch.compiler.config.cache_key_tag.split(",") if tag]


def _set_tags(tags: list[str]) -> None:
    torch.compiler.config.cache_key_tag = ",".join(tags)
