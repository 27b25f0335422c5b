//! Serving until told to stop, and stopping in order.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::serve::ListenerExt;
use tokio::net::TcpListener;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::router::App;

/// How long replies may take to leave after the end was asked for. With what closing the store
/// takes, the process ends within ten seconds.
const GRACE: Duration = Duration::from_secs(7);
const CLOSE: Duration = Duration::from_secs(2);

/// Serves until `stop`, then answers every waiting call, finishes what was begun, and closes the
/// store.
///
/// # Errors
///
/// The listener fails.
pub async fn serve(
    listener: TcpListener,
    router: Router,
    app: Arc<App>,
    stop: CancellationToken,
) -> io::Result<()> {
    // Replies are small and written at once: nothing is gained by holding them back.
    let listener = listener.tap_io(|stream| {
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "TCP_NODELAY cannot be set");
        }
    });
    let draining = stop.clone();
    let served = axum::serve(listener, router)
        .with_graceful_shutdown(async move { draining.cancelled().await });
    let serving = tokio::spawn(served.into_future());
    stop.cancelled().await;
    tracing::info!("shutting down");
    app.coordinator.drain();
    match timeout(GRACE, serving).await {
        Ok(Ok(result)) => result?,
        Ok(Err(error)) => tracing::error!(%error, "the server failed while shutting down"),
        Err(_) => tracing::warn!("connections are still open after the grace period"),
    }
    if timeout(CLOSE, app.coordinator.close()).await.is_err() {
        tracing::warn!("the store did not close in time");
    }
    Ok(())
}
