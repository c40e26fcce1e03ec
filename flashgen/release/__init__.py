"""Prebuilt kernels: builds a folder of sources, cubins and `manifest.json` from a request, and checks such a folder.

`build` needs NVRTC but no GPU, and with `sources_only` neither. FLASHGEN_RELEASE names a folder to use: kernels are
then first searched there, also on machines without NVRTC. For programs in other languages the manifest describes how
each kernel is launched, and a C++ header next to each cubin does the same.

`export` writes a Python package with prebuilt kernels that needs torch only.
"""

from flashgen.release.check import Finding, check, stale
from flashgen.release.export import export
from flashgen.release.folder import Progress, build
from flashgen.release.request import Request, Step, read_requests

__all__ = ["Finding", "Progress", "Request", "Step", "build", "check", "export", "read_requests", "stale"]
