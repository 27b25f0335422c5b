//! Closing a connection without losing its last reply.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

/// How long a client may take to end its side.
const LINGER: Duration = Duration::from_secs(5);

/// A connection that is closed in stages, as RFC 9112 (section 9.6) asks for: first for writing, and
/// wholly when the client has ended its side too.
///
/// A client whose request is refused for its size is still sending it. To close at once on what
/// nobody will read resets the connection, and with it, most often, the refusal is lost.
pub(super) struct Lingering {
    stream: TcpStream,
    /// From here on, nobody is waited for.
    stop: CancellationToken,
    /// Whether the client has ended its side.
    has_ended: bool,
    /// The end of patience, once the connection is closed for writing.
    closing: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
}

impl Lingering {
    pub(super) fn new(stream: TcpStream, stop: CancellationToken) -> Self {
        Self { stream, stop, has_ended: false, closing: None }
    }
}

impl AsyncRead for Lingering {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = ready!(Pin::new(&mut self.stream).poll_read(context, buffer));
        self.has_ended = read.is_err() || buffer.filled().len() == before;
        Poll::Ready(read)
    }
}

impl AsyncWrite for Lingering {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.closing.is_none() {
            ready!(Pin::new(&mut self.stream).poll_shutdown(context))?;
            let stop = self.stop.clone();
            self.closing = Some(Box::pin(async move {
                let _ = timeout(LINGER, stop.cancelled()).await;
            }));
        }
        while !self.has_ended {
            // Asked each time, for a client that sends without end.
            let is_over =
                self.closing.as_mut().is_none_or(|end| end.as_mut().poll(context).is_ready());
            if is_over {
                break;
            }
            let mut bytes = [0; 8 << 10];
            ready!(self.as_mut().poll_read(context, &mut ReadBuf::new(&mut bytes))).ok();
        }
        Poll::Ready(Ok(()))
    }
}
