# The Python extension hoccl_jax._native: XLA's FFI handlers and the nanobind module, from xla_ffi/*.cc.

file(GLOB module_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/xla_ffi/*.cc")
if(NOT module_sources)
  message(STATUS "hoccl: xla_ffi/ has no sources: the extension is left out")
  return()
endif()

find_package(Python 3.11 REQUIRED COMPONENTS Interpreter Development.Module OPTIONAL_COMPONENTS Development.SABIModule)
hoccl_ask_python(nanobind_ROOT "import nanobind; print(nanobind.cmake_dir())")
find_package(nanobind CONFIG REQUIRED)
hoccl_find_xla_headers()

# One extension serves all Pythons from 3.12 on (stable ABI); 3.11 gets one of its own.
nanobind_add_module(_native STABLE_ABI NB_STATIC NOMINSIZE ${module_sources})
target_include_directories(_native PRIVATE "${PROJECT_SOURCE_DIR}")
target_include_directories(_native SYSTEM PRIVATE "${HOCCL_XLA_INCLUDE_DIR}")
target_link_libraries(_native PRIVATE hoccl_comm hoccl_options)
if(HOCCL_INPLACE)
  set_target_properties(_native PROPERTIES LIBRARY_OUTPUT_DIRECTORY "${PROJECT_SOURCE_DIR}/hoccl_jax")
endif()
install(TARGETS _native LIBRARY DESTINATION hoccl_jax COMPONENT python)
