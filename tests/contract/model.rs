//! Every store does what the pure machine says.
//!
//! Random bursts of commands go through the engine, several at once on one key; the machine, run
//! alone on the same commands with the times that the answers report, must give the same outcomes
//! and the same revisions.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use fencepost::domain::ids::{Key, Kind as KeyKind, Name, Namespace, OwnerId, Scope};
use fencepost::domain::lease::{Claim, Command, Lease, LeaseMachine, Reference};
use fencepost::domain::time::Ttl;
use fencepost::domain::version::Version;
use fencepost::domain::{At, Decision, Machine};
use fencepost::engine::{Engine, Hub, Limits};
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
fn bursts() -> impl Strategy<Value = Vec<(Vec<Step>, bool)>> {
    let burst = prop::collection::vec(step(), 1..6);
    prop::collection::vec((burst, any::<bool>()), 1..12)
}

fn command(step: Step, newest: Option<&Lease>, next_grant: &mut i64) -> Command {
    let owner_id = |owner: u8| OwnerId::new(if owner == 0 { "a" } else { "b" }).unwrap();
    // Shorter than callers may ask for, so that leases lapse between two commands.
    let ttl = |is_short| Ttl::from_stored(if is_short { 2 } else { 60_000 });
    let version = |which| {
        let newest = newest.map_or(1_000, |lease| lease.version.get());
        Version::from_stored(match which {
            Which::Older => newest - 1,
            Which::Newest => newest,
            Which::Newer => newest + 1_000_000_000,
        })
    };
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

async fn follow_the_machine(
    engine: &Engine<LeaseMachine>,
    name: &str,
    bursts: &[(Vec<Step>, bool)],
) -> Result<(), TestCaseError> {
    let key = Key {
        kind: KeyKind::Lease,
        namespace: Namespace::default_namespace(),
        scope: Scope::none(),
        name: Name::new(name).unwrap(),
    };
    let mut model: Option<(Version, Lease)> = None;
    let mut next_grant = 0;
    for (steps, let_lapse) in bursts {
        let newest = model.as_ref().map(|(_, lease)| lease);
        let commands: Vec<Command> =
            steps.iter().map(|&step| command(step, newest, &mut next_grant)).collect();
        let answers = join_all(commands.iter().map(|command| engine.ask(&key, command.clone())));
        for (command, answer) in commands.iter().zip(answers.await) {
            let answer = answer.map_err(|error| TestCaseError::fail(error.to_string()))?;
            if let Some(grant) = answer.grant {
                grant.keep();
            }
            let now = answer.clock.now;
            let stamp = Version::next(model.as_ref().map(|(stamp, _)| *stamp), 0, now).unwrap();
            let lease = model.as_ref().map(|(_, lease)| lease);
            let outcome = match LeaseMachine::apply(lease, command, At { now, stamp }) {
                Decision::Keep(outcome) => outcome,
                Decision::Write(lease, outcome) => {
                    model = Some((stamp, lease));
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

fn check(kind: Kind, cases: u32) {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let (hub, metrics) = (Arc::new(Hub::default()), Arc::new(Metrics::default()));
    let world = runtime.block_on(World::new(kind));
    let engine = runtime.block_on(async {
        macro_rules! start {
            ($store:expr) => {{
                let store = Arc::new($store);
                let (limits, metrics) = (Limits::default(), Arc::clone(&metrics));
                Engine::<LeaseMachine>::start(
                    &(Arc::clone(&store) as _),
                    store,
                    Arc::clone(&hub),
                    limits,
                    &metrics,
                )
            }};
        }
        match kind {
            Kind::Memory => start!(MemoryStore::new()),
            Kind::Sqlite => start!(SqliteStore::open(&world.sqlite_file(), true).await.unwrap()),
            Kind::Postgres => {
                let (waker, metrics) = (Arc::clone(&hub) as _, Arc::clone(&metrics));
                let urls = [world.url()];
                start!(PostgresStore::open(&urls, None, true, waker, metrics).await.unwrap())
            }
        }
    });
    let next = AtomicU32::new(0);
    let mut runner =
        TestRunner::new(Config { cases, failure_persistence: None, ..Config::default() });
    let result = runner.run(&bursts(), |bursts| {
        // Each case, and each try to shrink one, on a key of its own.
        let name = format!("case {}", next.fetch_add(1, Ordering::Relaxed));
        runtime.block_on(follow_the_machine(&engine, &name, &bursts))
    });
    runtime.block_on(engine.close());
    result.unwrap();
}

#[test]
fn memory_does_what_the_machine_says() {
    check(Kind::Memory, 200);
}

#[test]
fn sqlite_does_what_the_machine_says() {
    check(Kind::Sqlite, 50);
}

#[test]
fn postgres_does_what_the_machine_says() {
    check(Kind::Postgres, 50);
}
