//! Serving until told to stop, and stopping in order.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1::Builder;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::at_once::AtOnce;
use super::lingering::Lingering;
use super::router::App;

/// How long a connection may stay without the head of a request, so that neither idle nor slow
/// clients can hold all of them.
const HEAD_TIMEOUT: Duration = Duration::from_mins(1);
/// How long replies may take to leave after the end was asked for. With what closing the store
/// takes, the process ends within ten seconds.
const GRACE: Duration = Duration::from_secs(7);
const CLOSE: Duration = Duration::from_secs(2);

/// Serves until `stop`, then answers every waiting call, finishes what was begun, and closes the
/// store.
pub async fn serve(listener: TcpListener, router: Router, app: Arc<App>, stop: CancellationToken) {
    // HTTP/1.1 alone: telling it from HTTP/2 takes 8 KiB more for each connection that waits.
    let mut builder = Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(HEAD_TIMEOUT);
    let open = GracefulShutdown::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = stop.cancelled() => break,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Out of file descriptors, perhaps: what is open goes on, and will end some time.
                tracing::warn!(%error, "cannot accept a connection");
                sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        // Replies are small and written at once: nothing is gained by holding them back.
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "TCP_NODELAY cannot be set");
        }
        let service = TowerToHyperService::new(router.clone());
        let stream = TokioIo::new(Lingering::new(stream, stop.clone()));
        let connection = builder.serve_connection(stream, service);
        let connection = open.watch(connection);
        tokio::spawn(async move {
            if let Err(error) = AtOnce::new(pin!(connection)).await {
                tracing::debug!(%error, "a connection broke");
            }
        });
    }
    tracing::info!("shutting down");
    drop(listener);
    app.coordinator.drain();
    if timeout(GRACE, open.shutdown()).await.is_err() {
        tracing::warn!("connections are still open after the grace period");
    }
    if timeout(CLOSE, app.coordinator.close()).await.is_err() {
        tracing::warn!("the store did not close in time");
    }
}
