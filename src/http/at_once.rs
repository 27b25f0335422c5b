//! Polling a connection again at once when it woke itself.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use futures_util::task::AtomicWaker;

/// How often a connection is polled in a row before other tasks get their turn.
const MAX_POLLS: usize = 8;

// The bits of a gate's state. Each change is a read-modify-write with both orderings, so that a poll
// sees all that was done before any of the wake-ups that it answers.

/// The connection is polled now: whoever polls will look for wake-ups afterwards.
const POLLED: u8 = 1;
/// The connection was woken since its last poll began.
const WOKEN: u8 = 2;
/// What it is serving was woken since its own last poll, and that of the connection, began.
const SERVICE_WOKEN: u8 = 4;

/// What stands between a connection and its task.
///
/// A connection wakes itself whenever a handler asks for a body, and wakes the handler when the body
/// is there. A task that does so is queued anew by the runtime, which also wakes another thread to
/// look for work: for a lone request, that was a third of all changes of thread. And the second of
/// these wake-ups is in vain, since the connection polls the handler next.
///
/// So the two have wakers of their own. One that is woken while the connection is polled does not
/// wake the task: unless the handler is polled after that in the same poll, the connection is
/// polled once more.
#[derive(Clone, Debug)]
pub(super) struct Gate {
    state: Arc<State>,
    connection: Waker,
    service: Waker,
}

#[derive(Debug)]
struct State {
    bits: AtomicU8,
    task: AtomicWaker,
}

impl State {
    fn wake(&self, bit: u8) {
        if self.bits.fetch_or(bit, Ordering::AcqRel) & POLLED == 0 {
            self.task.wake();
        }
    }
}

struct Signal<const BIT: u8>(Arc<State>);

impl<const BIT: u8> Wake for Signal<BIT> {
    fn wake(self: Arc<Self>) {
        self.0.wake(BIT);
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.0.wake(BIT);
    }
}

impl Gate {
    pub(super) fn new() -> Self {
        let state = Arc::new(State { bits: AtomicU8::new(0), task: AtomicWaker::new() });
        let connection = Waker::from(Arc::new(Signal::<WOKEN>(Arc::clone(&state))));
        let service = Waker::from(Arc::new(Signal::<SERVICE_WOKEN>(Arc::clone(&state))));
        Self { state, connection, service }
    }

    /// Runs a connection.
    pub(super) async fn connection<F: Future>(&self, connection: F) -> F::Output {
        let mut connection = pin!(connection);
        poll_fn(|context| self.poll_connection(connection.as_mut(), context)).await
    }

    fn poll_connection<F: Future>(
        &self,
        mut connection: Pin<&mut F>,
        context: &mut Context<'_>,
    ) -> Poll<F::Output> {
        self.state.task.register(context.waker());
        for _ in 0..MAX_POLLS {
            self.state.bits.swap(POLLED, Ordering::AcqRel);
            let polled = connection.as_mut().poll(&mut Context::from_waker(&self.connection));
            let was_woken = self.state.bits.swap(0, Ordering::AcqRel) != POLLED;
            if polled.is_ready() || !was_woken {
                return polled;
            }
        }
        context.waker().wake_by_ref();
        Poll::Pending
    }

    /// Answers one request, as a part of that connection.
    pub(super) async fn service<F: Future>(self, service: F) -> F::Output {
        let mut service = pin!(service);
        poll_fn(|_| {
            self.state.bits.fetch_and(!SERVICE_WOKEN, Ordering::AcqRel);
            service.as_mut().poll(&mut Context::from_waker(&self.service))
        })
        .await
    }
}

#[cfg(test)]
mod tests {
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

    /// Polls a connection's task once: whether it is ready, and how often the task was woken.
    fn poll_once(gate: &Gate, connection: impl Future) -> (bool, usize) {
        let task = Arc::new(Wakes::default());
        let waker = Waker::from(Arc::clone(&task));
        let polled = pin!(gate.connection(connection)).poll(&mut Context::from_waker(&waker));
        (polled.is_ready(), task.0.load(Ordering::Relaxed))
    }

    /// Is ready after it has woken itself `times` times.
    fn wakes_itself(times: usize) -> impl Future {
        let mut left = times;
        poll_fn(move |context| {
            if left == 0 {
                return Poll::Ready(());
            }
            left -= 1;
            context.waker().wake_by_ref();
            Poll::Pending
        })
    }

    #[test]
    fn a_connection_that_wakes_itself_is_polled_again_at_once() {
        let gate = Gate::new();
        assert_eq!(poll_once(&gate, wakes_itself(0)), (true, 0));
        assert_eq!(poll_once(&gate, wakes_itself(2)), (true, 0));
    }

    #[test]
    fn a_connection_that_never_rests_leaves_others_their_turn() {
        assert_eq!(poll_once(&Gate::new(), wakes_itself(1_000)), (false, 1));
    }

    #[derive(PartialEq)]
    enum When {
        Before,
        During,
        After,
    }

    /// How often a connection is polled whose handler never ends, and is woken in the connection's
    /// first poll: before, during, or after its own.
    fn polls_with_a_wake_up(when: When) -> usize {
        let gate = Gate::new();
        let wake = |now| {
            if now {
                gate.service.wake_by_ref();
            }
        };
        let mut own_polls = 0;
        let mut service = pin!(gate.clone().service(poll_fn(|_| {
            own_polls += 1;
            wake(own_polls == 1 && when == When::During);
            Poll::<()>::Pending
        })));
        let mut polls = 0;
        let connection = poll_fn(|context| {
            polls += 1;
            wake(polls == 1 && when == When::Before);
            let polled = service.as_mut().poll(context);
            wake(polls == 1 && when == When::After);
            polled
        });
        assert_eq!(poll_once(&gate, connection), (false, 0));
        polls
    }

    #[test]
    fn a_wake_up_that_the_handler_has_answered_needs_no_other_poll() {
        assert_eq!(polls_with_a_wake_up(When::Before), 1);
        assert_eq!(polls_with_a_wake_up(When::During), 2);
        assert_eq!(polls_with_a_wake_up(When::After), 2);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn no_wake_up_from_another_thread_is_lost() {
        let all = async {
            for number in 0..20_000 {
                let gate = Gate::new();
                let (to_connection, at_connection) = oneshot::channel();
                let (to_service, at_service) = oneshot::channel();
                let sending = tokio::spawn(async move {
                    to_service.send(number)?;
                    to_connection.send(number)
                });
                let both = async { tokio::join!(at_connection, gate.clone().service(at_service)) };
                assert_eq!(gate.connection(both).await, (Ok(number), Ok(number)));
                assert_eq!(sending.await.ok(), Some(Ok(())));
            }
        };
        assert!(timeout(Duration::from_mins(1), all).await.is_ok());
    }
}
