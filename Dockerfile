# The service, and the simulated engines: no Envoy, no compiler, no installer, no test tools.
# With --build-arg COMPILED=1 what every request passes through is compiled: three minutes more.
FROM docker.io/library/python:3.11-slim AS build
ARG COMPILED=
RUN if [ -n "$COMPILED" ]; then \
      apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev; \
    fi
WORKDIR /src
RUN python3 -m venv --without-pip /opt/llmgw
# What we depend on comes first: a change of our own code does not fetch it again. Without byte code,
# which is 39 MB for 0.7 s of one start, and without the tests that numpy brings.
COPY pyproject.toml ./
RUN python3 -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" \
      > requirements.txt \
 && python3 -m pip --python /opt/llmgw/bin/python3 install --no-cache-dir --no-compile --requirement requirements.txt \
 && find /opt/llmgw -type d -name tests -prune -exec rm -r '{}' +
COPY README.md ./
COPY extproc extproc
RUN HATCH_BUILD_HOOK_ENABLE_MYPYC=${COMPILED:+1} \
    python3 -m pip --python /opt/llmgw/bin/python3 install --no-cache-dir --no-compile --no-deps .

FROM docker.io/library/python:3.11-slim
COPY --from=build /opt/llmgw /opt/llmgw
ENV PATH=/opt/llmgw/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
# Decisions for Envoy; /healthz, /ready and /metrics.
EXPOSE 9002 9090
# A plain socket: it starts in a few hundredths of a second, and no proxy variable can divert it.
HEALTHCHECK --interval=10s --timeout=3s --start-period=5s CMD ["python3", "-IS", "-c", "\
import socket; c = socket.create_connection(('127.0.0.1', 9090), 2); \
c.sendall(b'GET /healthz HTTP/1.0\\r\\n\\r\\n'); \
raise SystemExit(b' 200 ' not in c.recv(64))"]
ENTRYPOINT ["llmgw"]
CMD ["serve", "--config", "/etc/llmgw/llmgw.yaml"]
