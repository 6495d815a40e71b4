"""The folder of the package that holds the extension for one version of torch.

The build (building/torch_headers.py) runs this file, and the import reads it: it imports nothing of normops.
"""

import re

# Of releases the minor version decides. Their local versions name what torch was built for, not other sources.
_RELEASE = re.compile(r"(\d+\.\d+)\.\d+(\+(cpu|cu\d+|rocm\d+(\.\d+)*|xpu))?")


def folder_of(torch_version: str) -> str:
    """Returns ``torch-2.13`` for a release, and a name with the whole version for a pre-release or a vendor's build."""
    release = _RELEASE.fullmatch(torch_version)
    return f"torch-{release[1] if release else torch_version}"
