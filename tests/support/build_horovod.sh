# Builds Horovod, with its Gloo controller alone, for the torch of an interpreter:
#     sh build_horovod.sh /path/to/python_with_pip /path/to/interpreter
# Its newest release says C++14, and the headers of torch need C++20.
set -eu
release=horovod-0.28.1
hash=92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$1" -m pip download --quiet --no-deps --no-binary :all: --no-build-isolation --dest "$folder" horovod==0.28.1
echo "$hash  $folder/$release.tar.gz" | sha256sum --check --quiet
tar -xf "$folder/$release.tar.gz" -C "$folder"
cd "$folder/$release"
sed -i 's/CXX_STANDARD 14/CXX_STANDARD 20/' CMakeLists.txt horovod/torch/CMakeLists.txt
export HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1
export HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 MAKEFLAGS="-j$(nproc)"
"$1" -m pip --python "$2" install --quiet --no-deps --no-build-isolation .
