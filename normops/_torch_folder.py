"""Names the folder of the package that contains the extension for a version of torch.

The build (building/torch_headers.py) runs this file, so it must not import normops.
"""

import re

# The minor version identifies a release. Its local version names the device that torch was built for, not the sources.
_RELEASE = re.compile(r"(\d+\.\d+)\.\d+(\+(cpu|cu\d+|rocm\d+(\.\d+)*|xpu))?")


def folder_of(torch_version: str) -> str:
    """Returns ``torch-2.13`` for a release, and a name with the whole version for a pre-release or a vendor's build."""
    release = _RELEASE.fullmatch(torch_version)
    return f"torch-{release[1] if release else torch_version}"
