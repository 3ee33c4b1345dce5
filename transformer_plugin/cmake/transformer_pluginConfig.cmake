# The target transformer_plugin::transformer_plugin: a program that links it has the ops of this package, in torch's dispatcher, from
# its start on. It links torch too.
#
#   find_package(transformer_plugin REQUIRED)  # CMAKE_PREFIX_PATH names the folders in which torch and this package lie
#   target_link_libraries(program PRIVATE transformer_plugin::transformer_plugin)
#
# docs/cpp.md has the command.
include(CMakeFindDependencyMacro)
find_dependency(Torch)

get_filename_component(_transformer_plugin_folder "${CMAKE_CURRENT_LIST_DIR}" DIRECTORY)
string(REGEX MATCH "^[0-9]+\\.[0-9]+" _transformer_plugin_torch "${Torch_VERSION}")
# The CUDA that torch was built with. CUDA_VERSION is that of the toolkit here, which may be another.
set(_transformer_plugin_cuda "")
if(EXISTS "${TORCH_INSTALL_PREFIX}/version.py")
  file(STRINGS "${TORCH_INSTALL_PREFIX}/version.py" _transformer_plugin_lines REGEX "^cuda")
  string(REGEX MATCH "'([0-9]+)\\." _transformer_plugin_match "${_transformer_plugin_lines}")
  set(_transformer_plugin_cuda "${CMAKE_MATCH_1}")
elseif(TARGET torch_cuda)
  string(REGEX MATCH "^[0-9]+" _transformer_plugin_cuda "${CUDA_VERSION}")
endif()

# As Python chooses: a library without CUDA also serves a torch with CUDA, unless one for another CUDA lies beside it.
set(_transformer_plugin_name "_C.torch${_transformer_plugin_torch}.cpu.so")
file(GLOB _transformer_plugin_others RELATIVE "${_transformer_plugin_folder}" "${_transformer_plugin_folder}/_C.torch*.so")
set(_transformer_plugin_of_torch ${_transformer_plugin_others})
list(FILTER _transformer_plugin_of_torch INCLUDE REGEX "^_C\\.torch${_transformer_plugin_torch}\\.cu[0-9]")
if(_transformer_plugin_cuda AND (_transformer_plugin_of_torch OR NOT "${_transformer_plugin_name}" IN_LIST _transformer_plugin_others))
  set(_transformer_plugin_name "_C.torch${_transformer_plugin_torch}.cu${_transformer_plugin_cuda}.so")
endif()
set(_transformer_plugin_found "${_transformer_plugin_folder}/${_transformer_plugin_name}")
if(NOT EXISTS "${_transformer_plugin_found}")
  set(transformer_plugin_FOUND FALSE)
  set(transformer_plugin_NOT_FOUND_MESSAGE
      "expected ${_transformer_plugin_name} in ${_transformer_plugin_folder}, for torch ${Torch_VERSION}, found: ${_transformer_plugin_others}. Build it: `pip install --no-build-isolation --force-reinstall --no-deps .` in the source tree, with this torch")
  return()
endif()

if(NOT TARGET transformer_plugin::transformer_plugin)
  add_library(transformer_plugin::transformer_plugin INTERFACE IMPORTED)
  # The program calls no symbol of the library, which a linker may therefore leave out. Those of torch that it needs come before it,
  # because they know where the libraries of CUDA are.
  set(_transformer_plugin_link "-Wl,--push-state,--no-as-needed")
  foreach(_transformer_plugin_each torch_cuda c10_cuda torch_cpu c10 torch)
    set(_transformer_plugin_path "${TORCH_INSTALL_PREFIX}/lib/lib${_transformer_plugin_each}.so")
    if(EXISTS "${_transformer_plugin_path}")
      string(APPEND _transformer_plugin_link ",\"${_transformer_plugin_path}\"")
    endif()
  endforeach()
  set_target_properties(transformer_plugin::transformer_plugin PROPERTIES
    INTERFACE_LINK_LIBRARIES "${_transformer_plugin_link},\"${_transformer_plugin_found}\",--pop-state;${TORCH_LIBRARIES}"
    INTERFACE_LINK_OPTIONS "LINKER:-rpath,${_transformer_plugin_folder}"
    INTERFACE_COMPILE_FEATURES cxx_std_20)
endif()
