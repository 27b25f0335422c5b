FROM rust:1.95-slim-bookworm AS build
WORKDIR /build
# The dependencies first: they change less often than the code.
COPY Cargo.toml Cargo.lock ./
RUN mkdir src \
    && echo 'fn main() {}' > src/main.rs \
    && touch src/lib.rs \
    && cargo build --release --locked \
    && rm -r src
COPY . .
# The copied files may be older than what was just built from the empty ones.
RUN touch src/main.rs src/lib.rs \
    && cargo build --release --locked \
    && mkdir state

FROM debian:bookworm-slim
COPY --from=build /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/
COPY --from=build /build/target/release/fencepost /usr/local/bin/
# Where the embedded database goes unless FENCEPOST_DATABASE_URL says otherwise.
COPY --from=build --chown=65532:65532 /build/state /var/lib/fencepost
WORKDIR /var/lib/fencepost
USER 65532:65532
# Any other address than loopback needs FENCEPOST_INSECURE_OPEN=true as well: the service has no
# access control yet, so only a private network may reach it.
ENV FENCEPOST_LISTEN=0.0.0.0:7420
EXPOSE 7420
HEALTHCHECK --interval=5s --timeout=6s --start-period=30s --retries=3 CMD ["fencepost", "health"]
ENTRYPOINT ["fencepost"]
