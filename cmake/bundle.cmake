# Makes a folder that runs on another x86-64 Linux: what `cmake --install` puts there, and the
# system libraries that it needs, except libc and CUDA's own.
#   cmake -DBUILD=build/bundle -DFOLDER=build/bundle/liger -P cmake/bundle.cmake
file(REMOVE_RECURSE ${FOLDER})
execute_process(
  COMMAND ${CMAKE_COMMAND} --install ${BUILD} --prefix ${FOLDER} --strip
  OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
file(GLOB own ${FOLDER}/lib/*.so)
file(GET_RUNTIME_DEPENDENCIES
  EXECUTABLES ${FOLDER}/bin/liger
  LIBRARIES ${own}
  RESOLVED_DEPENDENCIES_VAR needed
  UNRESOLVED_DEPENDENCIES_VAR missing
  PRE_EXCLUDE_REGEXES "^lib(cuda|cudart|cublas|cublasLt|nvrtc|nvJitLink)[-.].*" "^ld-linux"
    "^lib(c|m|dl|pthread|rt|gcc_s|stdc\\+\\+)\\.so")
if(missing)
  message(FATAL_ERROR "bundle: not found: ${missing}")
endif()
foreach(library ${needed})
  file(INSTALL ${library} DESTINATION ${FOLDER}/lib FOLLOW_SYMLINK_CHAIN)
endforeach()
file(GLOB_RECURSE files ${FOLDER}/*)
set(bytes 0)
foreach(file ${files})
  if(NOT IS_SYMLINK ${file})
    file(SIZE ${file} size)
    math(EXPR bytes "${bytes} + ${size}")
  endif()
endforeach()
math(EXPR mib "${bytes} / 1048576")
message(STATUS "bundle: ${FOLDER}, ${mib} MiB")
if(mib GREATER 60)
  message(FATAL_ERROR "bundle: ${mib} MiB, wanted 60 at most")
endif()
