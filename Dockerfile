# A training on a CPU, and the servers and the worker of compose.yaml.
#   docker build --tag fp8-grpo .
#   mkdir -p runs && docker run --rm --init --user "$(id -u)" --volume "$PWD/runs:/work/runs" fp8-grpo run tiny
FROM python:3.11-slim

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /opt/fp8-grpo
# What changes least comes first: a change of our code installs no package again.
COPY constraints/cpu.txt constraints/
RUN pip install --no-cache-dir --no-deps --constraint constraints/cpu.txt --extra-index-url "$TORCH_INDEX" torch
COPY pyproject.toml README.md LICENSE prefect.yaml ./
COPY configs configs
COPY flows flows
COPY fp8_grpo fp8_grpo
COPY tasks tasks
COPY fp8core fp8core
RUN pip install --no-cache-dir --constraint constraints/cpu.txt ".[math,datasets,postgres]"

# Prefect keeps a database at home, and any user may run the image (--user).
ENV HOME=/work
RUN mkdir --parents /work/runs && chmod 777 /work /work/runs
WORKDIR /work
USER 1000
ENTRYPOINT ["fp8-grpo"]
CMD ["doctor"]
