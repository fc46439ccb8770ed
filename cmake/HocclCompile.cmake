# How C++ is compiled here: warnings, sanitizers, and hoccl_room(), which makes the library of one room of the engine.

add_library(hoccl_options INTERFACE)
target_compile_options(hoccl_options INTERFACE -Wall -Wextra $<$<BOOL:${HOCCL_WERROR}>:-Werror>)
# GCC 12 and 13 report an overlap in the standard library's operator+(const char*, std::string&&) that is not there (GCC bug 105651).
target_compile_options(hoccl_options INTERFACE $<$<CXX_COMPILER_ID:GNU>:-Wno-restrict>)

if(HOCCL_SANITIZE STREQUAL "thread")
  set(sanitize -fsanitize=thread)
elseif(HOCCL_SANITIZE STREQUAL "address")
  set(sanitize -fsanitize=address,undefined -fno-sanitize-recover=all)
elseif(HOCCL_SANITIZE)
  message(FATAL_ERROR "HOCCL_SANITIZE is '${HOCCL_SANITIZE}'; it can be empty, 'thread' or 'address'")
endif()
if(HOCCL_SANITIZE)
  add_compile_options(${sanitize} -fno-omit-frame-pointer)
  add_link_options(${sanitize})
endif()

# hoccl_room(<name> USES <room>... LINK <library>...): the static library hoccl_<name> from csrc/<name>/**.cc.
#
# Headers are reached through one folder per room in the build tree, which holds a link to csrc/<name> alone. So #include "csrc/comm/world.h"
# compiles only in rooms above comm: an include against the arrows fails with "No such file or directory".
function(hoccl_room name)
  cmake_parse_arguments(PARSE_ARGV 1 room "" "" "USES;LINK")
  set(view "${PROJECT_BINARY_DIR}/rooms/${name}")
  file(MAKE_DIRECTORY "${view}/csrc")
  file(CREATE_LINK "${PROJECT_SOURCE_DIR}/csrc/${name}" "${view}/csrc/${name}" SYMBOLIC)

  file(GLOB_RECURSE sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/csrc/${name}/*.cc")
  if(NOT LIBFABRIC_FOUND)
    list(FILTER sources EXCLUDE REGEX "/csrc/net/ofi/")
  endif()

  list(TRANSFORM room_USES PREPEND hoccl_)
  set(target hoccl_${name})
  if(sources)
    add_library(${target} STATIC ${sources})
    target_include_directories(${target} PUBLIC "${view}")
    target_link_libraries(${target} PUBLIC ${room_USES} ${room_LINK} PRIVATE hoccl_options)
    # Most of a source's compile time goes into the standard headers. Several together share that; eight, so that there is still work for several cores.
    set_target_properties(${target} PROPERTIES UNITY_BUILD ${HOCCL_UNITY} UNITY_BUILD_BATCH_SIZE 8)
  else()  # a room of headers alone
    add_library(${target} INTERFACE)
    target_include_directories(${target} INTERFACE "${view}")
    target_link_libraries(${target} INTERFACE ${room_USES} ${room_LINK})
  endif()

  if(sources MATCHES "/csrc/device/cuda/")
    hoccl_find_cuda_headers()
    target_include_directories(${target} SYSTEM PUBLIC "${HOCCL_CUDA_INCLUDE_DIR}")
  endif()
  if(sources MATCHES "/csrc/net/ofi/")
    # Headers alone: the library is opened at run time, so that an extension built with it also works where it is missing.
    target_include_directories(${target} SYSTEM PRIVATE ${LIBFABRIC_INCLUDE_DIRS})
    target_compile_definitions(${target} PRIVATE HOCCL_HAVE_LIBFABRIC)
  endif()
endfunction()
