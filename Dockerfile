# psync, for all tasks of a cluster. An image of yours adds the script and what that imports:
#
#     docker build --tag psync .
#     FROM psync
#     COPY train.py .
#
# With an extra: docker build --build-arg EXTRAS='[torch]' .
FROM python:3.12-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim
ARG EXTRAS=""
# tini is process 1: it hands signals on, also before the script has handlers, and buries orphans.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends tini=0.19.* \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 psync \
    && useradd --uid 10001 --gid psync --create-home psync
COPY constraints.txt /tmp/constraints.txt
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir --constraint /tmp/constraints.txt "$(echo /wheels/psync-*.whl)${EXTRAS}"
ENV PYTHONUNBUFFERED=1
WORKDIR /app
USER 10001:10001
ENTRYPOINT ["tini", "--"]
CMD ["psync", "task"]
