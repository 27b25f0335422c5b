//! Every store does what the pure machines say.
//!
//! Random bursts of commands go through the engine, several at once on one key, and where the store
//! has replicas through one and the other by turns, so that what each remembers is out of date. The
//! machine, run alone on the same commands with the times that the answers report, must give the
//! same outcomes and the same revisions.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use fencepost::domain::ids::{Binding, CorrelationId, Key, Namespace, OwnerId, Scope};
use fencepost::domain::lease::{Claim, Command, Lease, LeaseMachine, Reference};
use fencepost::domain::record::{self, Content, Record, RecordMachine};
use fencepost::domain::time::{Retention, Ttl};
use fencepost::domain::version::Version;
use fencepost::domain::{At, Decision, Machine};
use fencepost::engine::{Engine, Hub, Limits};
use fencepost::store::Store;
use fencepost::store::memory::MemoryStore;
use fencepost::store::postgres::PostgresStore;
use fencepost::store::sqlite::SqliteStore;
use fencepost::telemetry::Metrics;
use futures_util::future::join_all;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use uuid::Uuid;

use crate::support::{Kind, World};

/// A generation, named by its distance from the newest one.
#[derive(Clone, Copy, Debug)]
enum Which {
    Older,
    Newest,
    Newer,
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Claim { owner: u8, is_short: bool, attempt: Option<u8>, may_take: bool },
    Renew { owner: u8, which: Which, is_short: bool },
    Release { owner: u8, which: Which },
    Watch { which: Option<Which> },
    Read,
    ForceRelease { which: Option<Which> },
    Undo { is_newest: bool },
}

fn which() -> impl Strategy<Value = Which> {
    prop_oneof![1 => Just(Which::Older), 4 => Just(Which::Newest), 1 => Just(Which::Newer)]
}

fn step() -> impl Strategy<Value = Step> {
    let owner = || 0..2_u8;
    prop_oneof![
        6 => (owner(), any::<bool>(), prop::option::of(0..2_u8), prop::bool::weighted(0.9)).prop_map(
            |(owner, is_short, attempt, may_take)| Step::Claim { owner, is_short, attempt, may_take }
        ),
        3 => (owner(), which(), any::<bool>())
            .prop_map(|(owner, which, is_short)| Step::Renew { owner, which, is_short }),
        3 => (owner(), which()).prop_map(|(owner, which)| Step::Release { owner, which }),
        2 => prop::option::of(which()).prop_map(|which| Step::Watch { which }),
        1 => Just(Step::Read),
        1 => prop::option::of(which()).prop_map(|which| Step::ForceRelease { which }),
        1 => any::<bool>().prop_map(|is_newest| Step::Undo { is_newest }),
    ]
}

/// Bursts; after each, short leases may lapse.
type Bursts<S> = Vec<(Vec<S>, bool)>;

fn bursts<S: Clone + std::fmt::Debug>(
    step: impl Strategy<Value = S>,
) -> impl Strategy<Value = Bursts<S>> {
    let burst = prop::collection::vec(step, 1..6);
    prop::collection::vec((burst, any::<bool>()), 1..12)
}

fn owner_id(owner: u8) -> OwnerId {
    OwnerId::new(if owner == 0 { "a" } else { "b" }).unwrap()
}

/// Shorter than callers may ask for, so that leases lapse between two commands.
fn ttl(is_short: bool) -> Ttl {
    Ttl::from_stored(if is_short { 2 } else { 60_000 })
}

fn version(newest: Option<&Lease>, which: Which) -> Version {
    let newest = newest.map_or(1_000, |lease| lease.version.get());
    Version::from_stored(match which {
        Which::Older => newest - 1,
        Which::Newest => newest,
        Which::Newer => newest + 1_000_000_000,
    })
}

fn command(step: Step, newest: Option<&Lease>, next_grant: &mut i64) -> Command {
    let version = |which| version(newest, which);
    match step {
        Step::Claim { owner, is_short, attempt, may_take } => {
            *next_grant += 1;
            Command::Claim(Claim {
                owner_id: owner_id(owner),
                ttl: ttl(is_short),
                attempt_id: attempt.map(|attempt| Uuid::from_u128(attempt.into())),
                grant_id: *next_grant,
                metadata: (owner == 1).then(|| r#"{"from":"b"}"#.to_owned()),
                may_take,
            })
        }
        Step::Renew { owner, which, is_short } => Command::Renew {
            reference: Reference { owner_id: owner_id(owner), version: version(which) },
            ttl: is_short.then(|| ttl(true)),
        },
        Step::Release { owner, which } => {
            Command::Release(Reference { owner_id: owner_id(owner), version: version(which) })
        }
        Step::Watch { which } => Command::Watch { version: which.map(version) },
        Step::Read => Command::Read,
        Step::ForceRelease { which } => Command::ForceRelease { version: which.map(version) },
        Step::Undo { is_newest } => {
            let newest = newest.map_or(0, |lease| lease.grant_id);
            Command::Undo { grant_id: if is_newest { newest } else { -1 } }
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum RecordStep {
    Claim {
        owner: u8,
        is_short: bool,
        attempt: Option<u8>,
        may_take: bool,
        binding: Option<bool>,
        is_traced: bool,
        unbinds: bool,
    },
    Complete {
        owner: u8,
        which: Which,
        content: u8,
        is_kept: bool,
    },
    Renew {
        owner: u8,
        which: Which,
        is_short: bool,
    },
    Release {
        owner: u8,
        which: Which,
        unbinds: bool,
    },
    Put {
        content: u8,
    },
    Delete,
    Read,
    ForceRelease {
        which: Option<Which>,
        unbinds: bool,
    },
    Undo {
        is_newest: bool,
        unbinds: bool,
    },
}

fn record_step() -> impl Strategy<Value = RecordStep> {
    use RecordStep as Step;
    let owner = || 0..2_u8;
    let claim = (
        owner(),
        any::<bool>(),
        prop::option::of(0..2_u8),
        prop::bool::weighted(0.9),
        prop::option::of(prop::bool::weighted(0.8)),
        any::<bool>(),
        any::<bool>(),
    );
    prop_oneof![
        8 => claim.prop_map(
            |(owner, is_short, attempt, may_take, binding, is_traced, unbinds)| Step::Claim {
                owner, is_short, attempt, may_take, binding, is_traced, unbinds
            }
        ),
        3 => (owner(), which(), 0..4_u8, any::<bool>()).prop_map(
            |(owner, which, content, is_kept)| Step::Complete { owner, which, content, is_kept }
        ),
        1 => (owner(), which(), any::<bool>())
            .prop_map(|(owner, which, is_short)| Step::Renew { owner, which, is_short }),
        3 => (owner(), which(), any::<bool>())
            .prop_map(|(owner, which, unbinds)| Step::Release { owner, which, unbinds }),
        1 => (0..4_u8).prop_map(|content| Step::Put { content }),
        2 => Just(Step::Delete),
        1 => Just(Step::Read),
        1 => (prop::option::of(which()), any::<bool>())
            .prop_map(|(which, unbinds)| Step::ForceRelease { which, unbinds }),
        1 => (any::<bool>(), any::<bool>())
            .prop_map(|(is_newest, unbinds)| Step::Undo { is_newest, unbinds }),
    ]
}

fn content(number: u8) -> Content {
    let (text, body) = match number {
        0 => ("1.0", None),
        1 => ("1.0", Some(&b""[..])),
        2 => (r#"{ "z":1, "a":1E400,"a":null}"#, Some(&b"\0\xff\xc3\x28"[..])),
        _ => ("null", None),
    };
    Content { text: text.into(), body: body.map(Into::into) }
}

fn record_command(
    step: RecordStep,
    newest: Option<&Record>,
    next_grant: &mut i64,
) -> record::Command {
    use RecordStep as Step;
    use record::Command;
    let newest = newest.map(|record| &record.lease);
    let version = |which| version(newest, which);
    let reference = |owner, which| Reference { owner_id: owner_id(owner), version: version(which) };
    match step {
        Step::Claim { owner, is_short, attempt, may_take, binding, is_traced, unbinds } => {
            *next_grant += 1;
            let text = |is_first| if is_first { "one" } else { "two" };
            Command::Claim {
                claim: Claim {
                    owner_id: owner_id(owner),
                    ttl: ttl(is_short),
                    attempt_id: attempt.map(|attempt| Uuid::from_u128(attempt.into())),
                    grant_id: *next_grant,
                    metadata: None,
                    may_take,
                },
                binding: binding.map(|is_first| Binding::new(text(is_first)).unwrap()),
                correlation_id: is_traced.then(|| CorrelationId::new("trace").unwrap()),
                unbinds,
            }
        }
        Step::Complete { owner, which, content: number, is_kept } => Command::Complete {
            reference: reference(owner, which),
            content: content(number),
            retention: (!is_kept).then_some(Retention::ONE_DAY),
        },
        Step::Renew { owner, which, is_short } => {
            Command::Renew { reference: reference(owner, which), ttl: is_short.then(|| ttl(true)) }
        }
        Step::Release { owner, which, unbinds } => {
            Command::Release { reference: reference(owner, which), unbinds }
        }
        Step::Put { content: number } => {
            Command::Put { content: content(number), retention: Retention::ONE_DAY }
        }
        Step::Delete => Command::Delete,
        Step::Read => Command::Read,
        Step::ForceRelease { which, unbinds } => {
            Command::ForceRelease { version: which.map(version), unbinds }
        }
        Step::Undo { is_newest, unbinds } => {
            let newest = newest.map_or(0, |lease| lease.grant_id);
            Command::Undo { grant_id: if is_newest { newest } else { -1 }, unbinds }
        }
    }
}

/// A machine whose steps can be made up.
trait Modelled: Machine<Command: Clone, Outcome: PartialEq> {
    type Step: Copy + std::fmt::Debug + 'static;

    fn step() -> BoxedStrategy<Self::Step>;

    fn command(
        step: Self::Step,
        newest: Option<&Self::State>,
        next_grant: &mut i64,
    ) -> Self::Command;
}

impl Modelled for LeaseMachine {
    type Step = Step;

    fn step() -> BoxedStrategy<Step> {
        step().boxed()
    }

    fn command(step: Step, newest: Option<&Lease>, next_grant: &mut i64) -> Command {
        command(step, newest, next_grant)
    }
}

impl Modelled for RecordMachine {
    type Step = RecordStep;

    fn step() -> BoxedStrategy<RecordStep> {
        record_step().boxed()
    }

    fn command(step: RecordStep, newest: Option<&Record>, next_grant: &mut i64) -> record::Command {
        record_command(step, newest, next_grant)
    }
}

async fn follow_the_machine<M: Modelled>(
    replicas: &[Arc<Engine<M>>],
    number: u32,
    bursts: &Bursts<M::Step>,
) -> Result<(), TestCaseError> {
    let kind = M::KINDS[usize::from(number % 2 == 1)];
    let (namespace, name) = (Namespace::default_namespace(), format!("case {number}"));
    let key = Key::new(kind, &namespace, &Scope::none(), &name);
    let mut model: Option<(Version, M::State)> = None;
    let mut next_grant = 0;
    for (place, (steps, let_lapse)) in bursts.iter().enumerate() {
        let engine = &replicas[place % replicas.len()];
        let newest = model.as_ref().map(|(_, state)| state);
        let commands: Vec<M::Command> =
            steps.iter().map(|&step| M::command(step, newest, &mut next_grant)).collect();
        let answers = join_all(commands.iter().map(|command| engine.ask(&key, command.clone())));
        for (command, answer) in commands.iter().zip(answers.await) {
            let answer = answer.map_err(|error| TestCaseError::fail(error.to_string()))?;
            if let Some(mut grant) = answer.grant {
                grant.keep();
            }
            let now = answer.clock.now;
            let stamp = Version::next(model.as_ref().map(|(stamp, _)| *stamp), 0, now).unwrap();
            let state = model.as_ref().map(|(_, state)| state);
            let outcome = match M::apply(state, command, At { now, stamp }) {
                Decision::Keep(outcome) => outcome,
                Decision::Write(state, outcome) => {
                    model = Some((stamp, state));
                    outcome
                }
            };
            prop_assert_eq!(answer.outcome, outcome, "{:?}", command);
            prop_assert_eq!(answer.revision, model.as_ref().map_or(0, |(stamp, _)| stamp.get()));
        }
        if *let_lapse {
            tokio::time::sleep(Duration::from_millis(3)).await;
        }
    }
    Ok(())
}

fn check<M: Modelled>(kind: Kind, cases: u32)
where
    MemoryStore: Store<M>,
    SqliteStore: Store<M>,
    PostgresStore: Store<M>,
{
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let (hub, metrics) = (Arc::new(Hub::default()), Arc::new(Metrics::default()));
    let world = runtime.block_on(World::new(kind));
    let replicas = runtime.block_on(async {
        macro_rules! start {
            ($store:expr) => {{
                let store = Arc::new($store);
                let (limits, metrics) = (Limits::default(), Arc::clone(&metrics));
                Engine::<M>::start(
                    &(Arc::clone(&store) as _),
                    store,
                    Arc::clone(&hub),
                    limits,
                    &metrics,
                )
            }};
        }
        match kind {
            Kind::Memory => vec![start!(MemoryStore::new())],
            Kind::Sqlite => {
                vec![start!(SqliteStore::open(&world.sqlite_file(), true).await.unwrap())]
            }
            Kind::Postgres => {
                let mut replicas = Vec::new();
                for _ in 0..2 {
                    let (waker, metrics) = (Arc::clone(&hub) as _, Arc::clone(&metrics));
                    let urls = [world.url()];
                    let store = PostgresStore::open(&urls, None, true, waker, metrics).await;
                    replicas.push(start!(store.unwrap()));
                }
                replicas
            }
        }
    });
    let next = AtomicU32::new(0);
    let mut runner =
        TestRunner::new(Config { cases, failure_persistence: None, ..Config::default() });
    let result = runner.run(&bursts(M::step()), |bursts| {
        // Each case, and each try to shrink one, on a key of its own.
        let number = next.fetch_add(1, Ordering::Relaxed);
        runtime.block_on(follow_the_machine(&replicas, number, &bursts))
    });
    runtime.block_on(join_all(replicas.iter().map(|engine| engine.close())));
    result.unwrap();
}

#[test]
fn memory_does_what_the_lease_machine_says() {
    check::<LeaseMachine>(Kind::Memory, 200);
}

#[test]
fn sqlite_does_what_the_lease_machine_says() {
    check::<LeaseMachine>(Kind::Sqlite, 50);
}

#[test]
fn postgres_does_what_the_lease_machine_says() {
    check::<LeaseMachine>(Kind::Postgres, 50);
}

#[test]
fn memory_does_what_the_record_machine_says() {
    check::<RecordMachine>(Kind::Memory, 200);
}

#[test]
fn sqlite_does_what_the_record_machine_says() {
    check::<RecordMachine>(Kind::Sqlite, 50);
}

#[test]
fn postgres_does_what_the_record_machine_says() {
    check::<RecordMachine>(Kind::Postgres, 50);
}
