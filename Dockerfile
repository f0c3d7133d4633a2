# Linux with all that llm.cupy needs where there is no GPU: on x86-64, and on aarch64, such as a Mac with an Apple chip.
#
#   docker build -t llm.cupy .
#   docker run --rm -it -v "$PWD:/llm.cupy" -v llm.cupy:/opt/llm.cupy llm.cupy make train
#
# The first volume is this repository, which the image does not hold. The second keeps what is installed and compiled
# from run to run: the virtual environment, outside of the repository, where the host may have one that fits the host
# only, and the CPU device's kernels. `make test` installs there what the tests need. On Linux, `--user "$(id -u):$(id -g)"`
# makes what is written to the repository yours instead of root's.
FROM debian:bookworm-slim@sha256:96e378d7e6531ac9a15ad505478fcc2e69f371b10f5cdf87857c4b8188404716

# g++ brings binutils, with which the microscope finds an access's line. Versions are the newest of this Debian release.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        ca-certificates curl g++ gdb git make python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*

# make reads variables from MAKEFLAGS as if they stood on its command line.
ENV MAKEFLAGS=VENV=/opt/llm.cupy/venv \
    PATH=/opt/llm.cupy/venv/bin:$PATH \
    HOME=/opt/llm.cupy \
    PIP_NO_CACHE_DIR=1

WORKDIR /llm.cupy
COPY Makefile requirements.txt ./
# An index beside pip's own, such as one that has PyTorch's CPU build, for what is installed now and later on.
ARG PIP_EXTRA_INDEX_URL
ENV PIP_EXTRA_INDEX_URL=$PIP_EXTRA_INDEX_URL
RUN make /opt/llm.cupy/venv/.ready-to-train \
    && chmod -R a+rwX /opt/llm.cupy

CMD ["bash"]
