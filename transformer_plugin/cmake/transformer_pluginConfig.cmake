# The target transformer_plugin::transformer_plugin: a program that links it has the ops of this package, in torch's dispatcher, from
# its start on. It links torch too.
#
#   find_package(transformer_plugin REQUIRED)  # with CMAKE_PREFIX_PATH: the folders that
#   target_link_libraries(program PRIVATE transformer_plugin::transformer_plugin)
#
# `python -c "import torch; print(torch.utils.cmake_prefix_path)"` and `pip show transformer_plugin` (Location) print.
include(CMakeFindDependencyMacro)
find_dependency(Torch)

get_filename_component(_transformer_plugin_folder "${CMAKE_CURRENT_LIST_DIR}" DIRECTORY)
string(REGEX MATCH "^[0-9]+\\.[0-9]+" _transformer_plugin_torch "${Torch_VERSION}")
# The library that Python takes: that with CUDA where torch has it, else that without.
set(_transformer_plugin_found "")
if(TARGET torch_cuda)
  string(REGEX MATCH "^[0-9]+" _transformer_plugin_cuda "${CUDA_VERSION}")
  file(GLOB _transformer_plugin_found
       "${_transformer_plugin_folder}/_C.torch${_transformer_plugin_torch}.cu${_transformer_plugin_cuda}.so")
endif()
if(NOT _transformer_plugin_found)
  file(GLOB _transformer_plugin_found "${_transformer_plugin_folder}/_C.torch${_transformer_plugin_torch}.cpu.so")
endif()
if(NOT _transformer_plugin_found)
  file(GLOB _transformer_plugin_others RELATIVE "${_transformer_plugin_folder}" "${_transformer_plugin_folder}/_C.torch*.so")
  set(transformer_plugin_FOUND FALSE)
  set(transformer_plugin_NOT_FOUND_MESSAGE
      "expected a library of ops for torch ${Torch_VERSION} in ${_transformer_plugin_folder}, found: ${_transformer_plugin_others}. Build it: `pip install --no-build-isolation --force-reinstall --no-deps .` in the source tree, with this torch")
  return()
endif()

if(NOT TARGET transformer_plugin::transformer_plugin)
  add_library(transformer_plugin::transformer_plugin INTERFACE IMPORTED)
  # The program calls no symbol of the library, which a linker may therefore leave out. Those of torch that it needs come before it,
  # because they know where the libraries of CUDA are.
  set(_transformer_plugin_link "-Wl,--push-state,--no-as-needed")
  foreach(_transformer_plugin_name torch_cuda c10_cuda torch_cpu c10 torch)
    set(_transformer_plugin_path "${TORCH_INSTALL_PREFIX}/lib/lib${_transformer_plugin_name}.so")
    if(EXISTS "${_transformer_plugin_path}")
      string(APPEND _transformer_plugin_link ",\"${_transformer_plugin_path}\"")
    endif()
  endforeach()
  set_target_properties(transformer_plugin::transformer_plugin PROPERTIES
    INTERFACE_LINK_LIBRARIES "${_transformer_plugin_link},\"${_transformer_plugin_found}\",--pop-state;${TORCH_LIBRARIES}"
    INTERFACE_LINK_OPTIONS "LINKER:-rpath,${_transformer_plugin_folder}"
    INTERFACE_COMPILE_FEATURES cxx_std_20)
endif()
