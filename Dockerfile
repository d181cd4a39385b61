# pflcore with its kernels for CPUs: see docs/install.md, "In a container".
FROM python:3.12-slim

# Torch comes first: the kernels are built against the torch that is there. TORCH_INDEX is
# the index that torch's own page names for a machine, such as one without a card.
ARG TORCH_INDEX
RUN pip install --no-cache-dir torch torchvision ${TORCH_INDEX:+--index-url $TORCH_INDEX}

WORKDIR /src
COPY setup.py pyproject.toml MANIFEST.in README.md LICENSE ./
COPY csrc csrc
COPY pflcore pflcore
# The compiler leaves in the step that brought it, so that no layer of the image holds it.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && PFLCORE_EXT=cpu pip install --no-cache-dir ".[cli,data,plot]" \
    && apt-get purge --yes --auto-remove g++ \
    && rm -rf /var/lib/apt/lists/* /src/build

RUN useradd --create-home pflcore
USER pflcore
WORKDIR /home/pflcore
CMD ["pflcore", "info"]
