# The service, and the simulated engines: no Envoy, no compiler, no installer, no test tools.
FROM docker.io/library/python:3.11-slim AS build
WORKDIR /src
RUN python3 -m venv --without-pip /opt/llmgw
# What we depend on first: a change of our code does not fetch it again.
COPY pyproject.toml ./
RUN python3 -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" \
      > requirements.txt \
 && python3 -m pip --python /opt/llmgw/bin/python3 install --no-cache-dir --no-compile -r requirements.txt
COPY README.md ./
COPY extproc extproc
RUN python3 -m pip --python /opt/llmgw/bin/python3 install --no-cache-dir --no-compile --no-deps .

FROM docker.io/library/python:3.11-slim
COPY --from=build /opt/llmgw /opt/llmgw
ENV PATH=/opt/llmgw/bin:$PATH PYTHONUNBUFFERED=1
USER 65532:65532
EXPOSE 9002 9090
CMD ["serve", "--config", "/etc/llmgw/llmgw.yaml"]
ENTRYPOINT ["llmgw"]
