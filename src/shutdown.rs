//! How the process ends.

use std::future::Future;

use tokio_util::task::TaskTracker;

/// The exit code after a bug ended a task that the service cannot be without (`EX_SOFTWARE` of
/// BSD's sysexits).
const EXIT_BUG: i32 = 70;

/// Runs a background task that the service cannot be without: a panic in it ends the process, as
/// a half-dead replica that still answers is worse than none.
pub fn spawn_vital<F>(tasks: &TaskTracker, task: F)
where
    F: Future<Output = ()> + Send + 'static,
{
    let task = tokio::spawn(task);
    tasks.spawn(async move {
        if let Err(error) = task.await
            && error.is_panic()
        {
            tracing::error!(%error, "a vital task has failed; this is a bug");
            std::process::exit(EXIT_BUG);
        }
    });
}

/// From here on, being asked to end (SIGTERM, or SIGINT as sent by Ctrl-C) does not end the process,
/// but resolves what is returned.
///
/// # Errors
///
/// The signal handlers cannot be installed.
pub fn requested() -> std::io::Result<impl Future<Output = ()>> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    })
}
