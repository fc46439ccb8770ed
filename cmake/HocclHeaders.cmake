# Finds headers of others that the build needs and no system package has to bring: CUDA's driver API and XLA's FFI. Both come from Python
# packages (see [build-system] in pyproject.toml) unless the user names a folder.

if(NOT SKBUILD)
  set(Python_FIND_VIRTUALENV FIRST)
endif()
find_package(Python 3.11 COMPONENTS Interpreter)

# Runs `code` in the interpreter and gives what it prints, or an empty string.
function(hoccl_ask_python out code)
  set(answer "")
  if(Python_EXECUTABLE)
    execute_process(COMMAND "${Python_EXECUTABLE}" -c "${code}" OUTPUT_VARIABLE answer OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  endif()
  set(${out} "${answer}" PARENT_SCOPE)
endfunction()

# The value of `#define <macro> <number>` in `file`, or -1.
function(hoccl_read_macro out file macro)
  set(value -1)
  if(EXISTS "${file}")
    file(STRINGS "${file}" lines REGEX "^#define ${macro} +[0-9]+")
    if(lines MATCHES "${macro} +([0-9]+)")
      set(value ${CMAKE_MATCH_1})
    endif()
  endif()
  set(${out} ${value} PARENT_SCOPE)
endfunction()

# Sets the cache variable HOCCL_CUDA_INCLUDE_DIR to a folder with cuda.h: that of the wheel nvidia-cuda-runtime, else of an installed toolkit.
# Only declarations are used, since the driver is loaded at run time: newer headers ask for no newer driver, and no GPU is needed.
function(hoccl_find_cuda_headers)
  set(oldest 12000)
  if(NOT HOCCL_CUDA_INCLUDE_DIR)
    hoccl_ask_python(packages "import nvidia; print(';'.join(nvidia.__path__))")
    set(candidates "")
    foreach(package IN LISTS packages)
      file(GLOB wheels "${package}/cu*/include")
      list(APPEND candidates ${wheels})
    endforeach()
    list(APPEND candidates "$ENV{CUDA_HOME}/include" "$ENV{CUDA_PATH}/include" /usr/local/cuda/include)
    foreach(candidate IN LISTS candidates)
      hoccl_read_macro(version "${candidate}/cuda.h" CUDA_VERSION)
      if(version GREATER_EQUAL oldest)
        set(HOCCL_CUDA_INCLUDE_DIR "${candidate}" CACHE PATH "Folder of cuda.h" FORCE)
        break()
      endif()
    endforeach()
  endif()
  hoccl_read_macro(version "${HOCCL_CUDA_INCLUDE_DIR}/cuda.h" CUDA_VERSION)
  if(version LESS oldest)
    message(FATAL_ERROR "hoccl: no cuda.h of CUDA 12.0 or newer (found: '${HOCCL_CUDA_INCLUDE_DIR}'). "
                        "Run 'pip install nvidia-cuda-runtime' for ${Python_EXECUTABLE}, or set HOCCL_CUDA_INCLUDE_DIR.")
  endif()
  message(STATUS "hoccl: cuda.h (CUDA_VERSION ${version}) from ${HOCCL_CUDA_INCLUDE_DIR}")
endfunction()

# Sets the cache variable HOCCL_XLA_INCLUDE_DIR to the folder of xla/ffi/api: jaxlib's of the building interpreter.
# A runtime refuses handlers whose headers are newer than itself, so a build for others must use the oldest supported jaxlib.
function(hoccl_find_xla_headers)
  set(oldest_supported_minor 3)  # jaxlib 0.10.2
  if(NOT HOCCL_XLA_INCLUDE_DIR)
    hoccl_ask_python(include "import importlib.util as u, pathlib; print(pathlib.Path(u.find_spec('jaxlib').origin).parent / 'include')")
    set(HOCCL_XLA_INCLUDE_DIR "${include}" CACHE PATH "Folder of xla/ffi/api" FORCE)
  endif()
  hoccl_read_macro(minor "${HOCCL_XLA_INCLUDE_DIR}/xla/ffi/api/c_api.h" XLA_FFI_API_MINOR)
  if(minor LESS 0)
    message(FATAL_ERROR "hoccl: no xla/ffi/api/c_api.h in '${HOCCL_XLA_INCLUDE_DIR}'. "
                        "Run 'pip install jaxlib' for ${Python_EXECUTABLE}, or set HOCCL_XLA_INCLUDE_DIR.")
  endif()
  message(STATUS "hoccl: XLA FFI headers 0.${minor} from ${HOCCL_XLA_INCLUDE_DIR}")
  if(minor GREATER oldest_supported_minor)
    message(STATUS "hoccl: the extension will need a jaxlib as new as these headers; "
                   "set HOCCL_XLA_INCLUDE_DIR to those of jaxlib 0.10.2 (FFI 0.${oldest_supported_minor}) to support all")
  endif()
endfunction()
