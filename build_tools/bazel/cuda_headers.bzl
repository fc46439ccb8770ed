"""The repository @cuda_headers: the folder of cuda.h as a library of headers. Only declarations; the driver is loaded at run time."""

_BUILD = """
cc_library(
    name = "cuda_headers",
    hdrs = glob(["include/**/*.h"]),
    includes = ["include"],
    visibility = ["//visibility:public"],
)
"""

def _cuda_headers_impl(repository_ctx):
    environ = repository_ctx.os.environ
    candidates = [
        environ.get("HOCCL_CUDA_INCLUDE_DIR", ""),
        environ.get("CUDA_HOME", "/usr/local/cuda") + "/include",
    ]
    for candidate in candidates:
        header = repository_ctx.path((candidate or "/nonexistent") + "/cuda.h")
        if header.exists:
            # Neither includes anything but the other and the C library.
            for name in ["cuda.h", "cudaTypedefs.h"]:
                repository_ctx.symlink(header.dirname.get_child(name), "include/" + name)
            repository_ctx.file("BUILD", _BUILD)
            return
    fail("no cuda.h in %s: give its folder with --repo_env=HOCCL_CUDA_INCLUDE_DIR=..." % candidates)

cuda_headers = repository_rule(
    implementation = _cuda_headers_impl,
    environ = ["CUDA_HOME", "HOCCL_CUDA_INCLUDE_DIR"],
    local = True,
)
