"""What a frozen program needs of beaconkv_gguf beside the modules that PyInstaller sees."""

from PyInstaller.utils.hooks import collect_data_files, collect_dynamic_libs

# Everything keeps its folder below the package: __file__ leads there in a frozen program as well.
binaries = collect_dynamic_libs("beaconkv_gguf")
binaries += collect_data_files("beaconkv_gguf", includes=["lib/llama-server*"])
datas = collect_data_files("beaconkv_gguf", includes=["include/*.h", "licenses/*", "page/**"])
