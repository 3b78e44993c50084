# MeSP with all that it needs, for a machine with Docker and without a Swift toolchain. The folder that it is started
# in is /work:
#
#     docker build --tag mesp .
#     docker run --rm --user "$(id -u):$(id -g)" --volume "$PWD:/work" mesp export --model demo
FROM swift:6.3-noble@sha256:66520bcba471018a34fd54ba09be97ba4abebd950a96ff5cb8c2bf50a2d33259

# Of the image's Ubuntu, which changes no package's version but to mend it.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3-venv \
    && rm -rf /var/lib/apt/lists/*

COPY . /mesp

# The engine and mesp-count are built with the image, where every user can read them.
ENV PATH=/opt/mesp/bin:$PATH
RUN python3 -m venv /opt/mesp \
    && pip install --no-cache-dir --require-hashes --requirement /mesp/.ci/image.txt \
    && pip install --no-cache-dir --no-deps --no-build-isolation /mesp \
    && cp "$(python -m mesp.engine)" "$(python -m mesp.engine mesp-count)" /opt/mesp/bin/ \
    && rm -r /root/.cache
ENV MESP_ENGINE=/opt/mesp/bin/mesp-engine

# Downloads lie there too, and are kept.
ENV HOME=/work
WORKDIR /work
ENTRYPOINT ["mesp"]
