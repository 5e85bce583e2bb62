# Everything that a host of a run may do: head, learner, rollout worker, reward pool, environment server.
#   docker build -t tandem .
# It is made by launch/setup.sh, which installs the versions of constraints.txt, as on any other machine.
#   --build-arg OPTIONS="--role all --gpu"       for GPUs, with vLLM, wherever it is built
#   --build-arg OPTIONS="--role reward"          a small one, for grading alone
ARG PYTHON=3.12
FROM python:${PYTHON}-slim-bookworm

# The compiler is for Triton, by which vLLM and the learner compile kernels on a GPU.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc git libc6-dev redis-server tini \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/tandem
COPY . .
ARG OPTIONS="--role all"
ENV TANDEM_VENV=/opt/venv
RUN bash launch/setup.sh ${OPTIONS} </dev/null && rm -rf /root/.cache

# The user of the manifests' securityContext.
RUN useradd --uid 1000 --create-home tandem && mkdir /runs && chown tandem /runs
USER tandem
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /runs
# Reaps what is left of ended processes, and hands SIGTERM on.
ENTRYPOINT ["tini", "--", "tandem"]
CMD ["--help"]
