#!/bin/sh
# Install what /opt/rollout/requirements.txt names: install.sh [OPTION OF PIP ...]
#
# One step of the Dockerfile for all of it, so that what is removed again is in no layer.
set -eu
PIP_CONFIG_FILE=/run/secrets/pip.conf \
  pip install --no-cache-dir --no-compile --only-binary :all: --require-hashes "$@" -r /opt/rollout/requirements.txt
site=$(echo /opt/rollout/lib/python3.*/site-packages)

# Nobody loads the tests of libraries, nor static ones but the two that nvcc links by itself.
for library in numba numpy pandas pyarrow scipy sympy; do
  [ ! -d "$site/$library" ] || find "$site/$library" -type d -name tests -prune -exec rm -r {} +
done
find "$site" -name "*.a" ! -name libcudart_static.a ! -name libcudadevrt.a -delete
# Compiled by several processes at once; some libraries ship templates that are no Python.
python3 -m compileall -q -j 8 "$site" >/dev/null || true
# Symbols that only a debugger reads, 370 MB of them. These two libraries run on CPUs, too, so that
# hack/check_image.py shows that they still work; what only a GPU would show is left alone.
for library in triton/_C/libtriton.so torch/lib/libtorch_cpu.so; do
  if [ -f "$site/$library" ] && command -v strip >/dev/null; then
    strip --strip-unneeded "$site/$library"
  fi
done

# Where compilers and loaders look for CUDA: the packages lack the names that a toolkit has. The
# stub of the driver is only linked against; the node's driver brings the library itself.
cuda=$site/nvidia/cu13
if [ -x "$cuda/bin/nvcc" ]; then
  ln -s "$cuda" /usr/local/cuda
  ln -s lib "$cuda/lib64"
  ln -s libcudart.so.13 "$cuda/lib/libcudart.so"
  mkdir "$cuda/lib/stubs"
  gcc -shared -Wl,-soname,libcuda.so.1 -o "$cuda/lib/stubs/libcuda.so" -x c /dev/null
fi
if [ -d "$cuda/lib" ]; then
  # By the loader's own list, not LD_LIBRARY_PATH, which a pod may set anew for its driver.
  echo "$cuda/lib" >/etc/ld.so.conf.d/cuda.conf
  ldconfig
fi
