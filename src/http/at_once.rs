//! Polling again at once what woke itself.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use futures_util::task::AtomicWaker;

/// How often a future is polled in a row before other tasks get their turn.
const MAX_POLLS: usize = 8;

// The bits of a gate's state. Each change is a read-modify-write with both orderings, so that a poll
// sees all that was done before any of the wake-ups that it answers.

/// Not polled now: the task must be woken.
const IDLE: u8 = 0;
/// Polled now: whoever polls will look for wake-ups afterwards.
const POLLED: u8 = 1;
/// Woken since the last poll began.
const WOKEN: u8 = 2;

/// A future that is polled again at once when it was woken during a poll.
///
/// A connection wakes itself whenever a handler asks for a body, and once more when the body is
/// there. A task that does so is queued anew by the runtime, which also wakes another thread to look
/// for work: for a lone request, that was a third of all changes of thread.
#[derive(Debug)]
pub(super) struct AtOnce<F> {
    future: F,
    gate: Arc<Gate>,
    waker: Waker,
}

/// What the future wakes in place of the task.
#[derive(Debug)]
struct Gate {
    state: AtomicU8,
    task: AtomicWaker,
}

impl Wake for Gate {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if self.state.fetch_or(WOKEN, Ordering::AcqRel) & POLLED == 0 {
            self.task.wake();
        }
    }
}

impl<F: Future + Unpin> AtOnce<F> {
    pub(super) fn new(future: F) -> Self {
        let gate = Arc::new(Gate { state: AtomicU8::new(IDLE), task: AtomicWaker::new() });
        let waker = Waker::from(Arc::clone(&gate));
        Self { future, gate, waker }
    }
}

impl<F: Future + Unpin> Future for AtOnce<F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        let Self { future, gate, waker } = self.get_mut();
        gate.task.register(context.waker());
        for _ in 0..MAX_POLLS {
            gate.state.swap(POLLED, Ordering::AcqRel);
            let polled = Pin::new(&mut *future).poll(&mut Context::from_waker(waker));
            let was_woken = gate.state.swap(IDLE, Ordering::AcqRel) & WOKEN != 0;
            if polled.is_ready() || !was_woken {
                return polled;
            }
        }
        context.waker().wake_by_ref();
        Poll::Pending
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::pin::pin;
    use std::sync::atomic::AtomicUsize;
    use std::time::Duration;

    use tokio::sync::oneshot;
    use tokio::time::timeout;

    use super::*;

    #[derive(Default)]
    struct Wakes(AtomicUsize);

    impl Wake for Wakes {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Polls once what wakes itself `times` times before it is ready: whether it is, and how often
    /// the task was woken.
    fn poll_once(times: usize) -> (bool, usize) {
        let mut left = times;
        let future = pin!(AtOnce::new(poll_fn(|context| {
            if left == 0 {
                return Poll::Ready(());
            }
            left -= 1;
            context.waker().wake_by_ref();
            Poll::Pending
        })));
        let task = Arc::new(Wakes::default());
        let waker = Waker::from(Arc::clone(&task));
        let polled = future.poll(&mut Context::from_waker(&waker));
        (polled.is_ready(), task.0.load(Ordering::Relaxed))
    }

    #[test]
    fn what_wakes_itself_is_polled_again_at_once() {
        assert_eq!(poll_once(0), (true, 0));
        assert_eq!(poll_once(2), (true, 0));
    }

    #[test]
    fn what_never_rests_leaves_others_their_turn() {
        assert_eq!(poll_once(1_000), (false, 1));
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn no_wake_up_from_another_thread_is_lost() {
        let all = async {
            for number in 0..20_000 {
                let (sender, receiver) = oneshot::channel();
                let sending = tokio::spawn(async move { sender.send(number) });
                assert_eq!(AtOnce::new(receiver).await, Ok(number));
                assert_eq!(sending.await.ok(), Some(Ok(())));
            }
        };
        assert!(timeout(Duration::from_mins(1), all).await.is_ok());
    }
}
