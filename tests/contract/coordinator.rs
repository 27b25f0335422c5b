//! The service without HTTP, as a program in Rust uses it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use fencepost::coordinator::{
    Campaign, ClaimExecution, ClaimLease, ClaimRecord, Coordinator, CoordinatorOptions, Stores,
    WaitOutcome,
};
use fencepost::domain::idempotency::{Head, StoredResponse};
use fencepost::domain::ids::{Key, Name, OwnerId, Scope};
use fencepost::domain::lease::{self, CampaignOutcome, Lease, LeaseMachine, Reference};
use fencepost::domain::record::{self, RecordState};
use fencepost::domain::time::Ttl;
use fencepost::domain::version::Version;
use fencepost::engine::{EngineError, Hub};
use fencepost::store::memory::MemoryStore;
use fencepost::store::{
    ListQuery, Listed, Loaded, Moment, OpenError, Store, StoreError, Stored, Write,
};
use sqlx::{ConnectOptions as _, Connection as _};
use tokio::task::JoinSet;
use tokio::time::timeout;
use uuid::Uuid;

use crate::support::{Kind, World, eventually};

/// Longer than what comes at once takes on a busy machine, and shorter than any wait here.
const PROMPT: Duration = Duration::from_secs(20);

const KINDS: [Kind; 3] = [Kind::Memory, Kind::Sqlite, Kind::Postgres];

fn name(text: &str) -> Name {
    text.parse().unwrap()
}

fn owner(text: &str) -> OwnerId {
    text.parse().unwrap()
}

fn ttl(millis: i64) -> Ttl {
    Ttl::from_millis(millis).unwrap()
}

async fn open(world: &World) -> Coordinator {
    Coordinator::open(&world.url(), CoordinatorOptions::default()).await.unwrap()
}

fn execution(of: &str, wait: Duration) -> ClaimExecution {
    ClaimExecution {
        intent: "i".parse().unwrap(),
        owner_id: owner(of),
        correlation_id: None,
        ttl: ttl(60_000),
        attempt_id: None,
        wait,
    }
}

fn write(of: &str, fingerprint: Option<&str>, millis: i64) -> ClaimRecord {
    ClaimRecord {
        fingerprint: fingerprint.map(|text| text.parse().unwrap()),
        owner_id: owner(of),
        ttl: ttl(millis),
        attempt_id: None,
        wait: Duration::ZERO,
    }
}

fn candidate(of: &str, wait: Duration) -> Campaign {
    Campaign { owner_id: owner(of), version: None, ttl: ttl(60_000), metadata: None, wait }
}

#[track_caller]
fn granted(outcome: record::ClaimOutcome) -> Lease {
    match outcome {
        record::ClaimOutcome::Claimed { lease, repeated: false } => lease,
        other => panic!("{other:?}"),
    }
}

#[track_caller]
fn claimed(outcome: lease::ClaimOutcome) -> Lease {
    match outcome {
        lease::ClaimOutcome::Claimed { lease, repeated: false } => lease,
        other => panic!("{other:?}"),
    }
}

#[track_caller]
fn led(outcome: CampaignOutcome) -> Lease {
    match outcome {
        CampaignOutcome::Leading { lease, .. } => lease,
        other => panic!("{other:?}"),
    }
}

fn reference(lease: &Lease) -> Reference {
    Reference { owner_id: lease.owner_id.clone(), version: lease.version }
}

fn response(body: &'static [u8]) -> StoredResponse {
    let head = Head { status: 201, content_type: None, headers: Vec::new() };
    StoredResponse { head, body: Some(body.into()) }
}

#[tokio::test(flavor = "multi_thread")]
async fn all_that_can_be_done_over_http_can_be_done_in_process() {
    for kind in KINDS {
        let world = World::new(kind).await;
        let coordinator = open(&world).await;
        let (k, scope) = (name("k"), Scope::none());

        let leases = coordinator.leases();
        let wish = ClaimLease::new(owner("a"), ttl(60_000));
        let lease = claimed(leases.claim(&k, wish.clone()).await.unwrap().keep().0);
        assert!(matches!(
            leases.claim(&k, wish).await.unwrap().keep().0,
            lease::ClaimOutcome::Held(held) if held == lease
        ));
        assert_eq!(leases.verify(&k, lease.version).await.unwrap(), Ok(()));
        let waiting = leases.wait(&k, Some(lease.version), Duration::from_millis(50)).await;
        assert!(matches!(waiting.unwrap().outcome, WaitOutcome::TimedOut(_)));
        let renewed = leases.renew(&k, reference(&lease), None).await.unwrap().keep().0;
        assert!(matches!(renewed, lease::RenewOutcome::Renewed(_)));
        let renewals = [(k.clone(), reference(&lease)), (name("other"), reference(&lease))];
        let renewed = leases.renew_many(renewals, None).await.into_iter();
        let renewed: Vec<_> = renewed.map(|reply| reply.unwrap().keep().0).collect();
        assert!(matches!(
            renewed[..],
            [lease::RenewOutcome::Renewed(_), lease::RenewOutcome::Stale(_)]
        ));
        let released = leases.release(&k, reference(&lease)).await.unwrap().keep().0;
        assert_eq!(released, lease::ReleaseOutcome::Released);

        let executions = coordinator.executions();
        let wish = || execution("a", Duration::ZERO);
        let run = granted(executions.claim(&k, wish()).await.unwrap().keep().0);
        let done = executions.complete(&k, reference(&run), r#"{"n": 1.0}"#.into()).await;
        assert_eq!(done.unwrap().keep().0, record::CompleteOutcome::Completed);
        let told = executions.claim(&k, wish()).await.unwrap().keep().0;
        assert!(matches!(
            told,
            record::ClaimOutcome::Completed(_, done) if &*done.content.text == r#"{"n": 1.0}"#
        ));
        let wishes = ["l", "m"].map(|id| (name(id), wish()));
        let mut results = Vec::new();
        for (id, reply) in ["l", "m"].into_iter().zip(executions.claim_many(wishes).await) {
            let run = granted(reply.unwrap().keep().0);
            results.push((name(id), reference(&run), id.len().to_string().into()));
        }
        for reply in executions.complete_many(results).await {
            assert_eq!(reply.unwrap().keep().0, record::CompleteOutcome::Completed);
        }
        let page = executions.list(None, |state| state == RecordState::Completed, None, 10).await;
        assert_eq!(page.unwrap().items.len(), 3);

        let records = coordinator.idempotency();
        let claim = records.claim(&scope, &k, write("a", None, 60_000)).await.unwrap();
        let claim = granted(claim.keep().0);
        assert_eq!(records.get(&scope, &k).await.unwrap(), None);
        let done = response(b"\0\xff");
        let completing = records.complete(&scope, &k, reference(&claim), done.clone(), None).await;
        assert_eq!(completing.unwrap().keep().0, record::CompleteOutcome::Completed);
        assert_eq!(records.get(&scope, &k).await.unwrap(), Some(done));
        let putting = records.put(&scope, &k, response(b"put"), None).await.unwrap();
        assert!(matches!(putting.keep().0, record::PutOutcome::Stored { .. }));
        assert_eq!(records.get(&scope, &k).await.unwrap(), Some(response(b"put")));
        let deleting = records.delete(&scope, &k).await.unwrap().keep().0;
        assert_eq!(deleting, record::DeleteOutcome::Deleted);

        let leaders = coordinator.leaders();
        let term = leaders.campaign(&k, candidate("a", Duration::ZERO)).await.unwrap();
        let term = led(term.keep().0);
        assert!(leaders.gate(&k, &owner("a")).await.unwrap().outcome.is_some());
        assert!(leaders.gate(&k, &owner("b")).await.unwrap().outcome.is_none());
        let resigned = leaders.resign(&k, &owner("a"), term.version).await.unwrap().keep().0;
        assert_eq!(resigned, lease::ReleaseOutcome::Released);
        coordinator.close().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_is_named_by_its_url() {
    for url in ["memory", "memory:"] {
        let coordinator = Coordinator::open(url, CoordinatorOptions::default()).await.unwrap();
        assert_eq!(coordinator.backend().name(), "memory");
    }
    for (kind, name) in [(Kind::Sqlite, "sqlite"), (Kind::Postgres, "postgres")] {
        let world = World::new(kind).await;
        let coordinator = open(&world).await;
        assert_eq!(coordinator.backend().name(), name);
        coordinator.close().await;
    }
    for url in ["", "mysql://h/d", "sqlite:", "sqlite::memory:", "memory:x", "postgres:/h", "/x.db"]
    {
        match Coordinator::open(url, CoordinatorOptions::default()).await {
            Err(OpenError::Configuration(reason)) => assert!(!reason.is_empty()),
            other => panic!("{url}: {other:?}"),
        }
    }
    let options = CoordinatorOptions {
        connect_timeout: Duration::from_millis(300),
        ..CoordinatorOptions::default()
    };
    match Coordinator::open("postgres://nobody@127.0.0.1:1/nothing", options).await {
        Err(OpenError::Unreachable(reason)) => assert!(!reason.is_empty()),
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn two_coordinators_on_one_database_share_what_they_hold() {
    let world = World::new(Kind::Postgres).await;
    let (one, two) = (open(&world).await, open(&world).await);
    let (k, scope) = (name("k"), Scope::none());
    let wish = ClaimLease::new(owner("a"), ttl(60_000));
    claimed(one.leases().claim(&k, wish.clone()).await.unwrap().keep().0);
    let told = two.leases().claim(&k, wish).await.unwrap().keep().0;
    assert!(matches!(told, lease::ClaimOutcome::Held(_)));
    one.idempotency().put(&scope, &k, response(b"x"), None).await.unwrap().keep();
    assert_eq!(two.idempotency().get(&scope, &k).await.unwrap(), Some(response(b"x")));
    let run = one.executions().claim(&k, execution("a", Duration::ZERO)).await.unwrap();
    let run = granted(run.keep().0);
    let (there, id) = (two.clone(), k.clone());
    let waiting = tokio::spawn(async move {
        there
            .executions()
            .claim(&id, execution("b", Duration::from_secs(50)))
            .await
            .unwrap()
            .keep()
            .0
    });
    eventually(|| async { two.options().metrics.waiters.get() == 1 }).await;
    one.executions().complete(&k, reference(&run), "1".into()).await.unwrap().keep();
    assert!(matches!(waiting.await.unwrap(), record::ClaimOutcome::Completed(..)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_is_given_an_owner_id_or_makes_a_new_one() {
    let options = |id: Option<&str>| CoordinatorOptions {
        owner_id: id.map(owner),
        ..CoordinatorOptions::default()
    };
    let named = Coordinator::open("memory:", options(Some("run 1"))).await.unwrap();
    assert_eq!(named.owner_id().as_str(), "run 1");
    assert!(named.leader(name("s")).is_leader().await);
    assert!(named.leaders().gate(&name("s"), &owner("run 1")).await.unwrap().outcome.is_some());
    let ids = [
        Coordinator::open("memory:", options(None)).await.unwrap(),
        Coordinator::open("memory:", options(None)).await.unwrap(),
    ]
    .map(|coordinator| coordinator.owner_id().as_str().to_owned());
    assert_ne!(ids[0], ids[1]);
    for id in &ids {
        Uuid::parse_str(id).unwrap();
    }
    let clone = named.clone();
    assert_eq!(clone.owner_id(), named.owner_id());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_program_can_use_the_same_postgres_for_its_own_tables() {
    let world = World::new(Kind::Postgres).await;
    let coordinator = open(&world).await;
    let pool = coordinator.pool().unwrap();
    sqlx::query("CREATE TABLE jobs (id bigint PRIMARY KEY)").execute(&pool).await.unwrap();
    let mut transaction = pool.begin().await.unwrap();
    sqlx::query("INSERT INTO jobs VALUES ($1)")
        .bind(7_i64)
        .execute(&mut *transaction)
        .await
        .unwrap();
    transaction.commit().await.unwrap();
    let jobs: Vec<i64> = sqlx::query_scalar("SELECT id FROM jobs").fetch_all(&pool).await.unwrap();
    assert_eq!(jobs, [7]);
    // A program that keeps its connections busy keeps nobody from a lease.
    let mut busy = Vec::new();
    while busy.len() < usize::try_from(pool.options().get_max_connections()).unwrap() {
        busy.push(pool.acquire().await.unwrap());
    }
    let wish = ClaimLease::new(owner("a"), ttl(60_000));
    claimed(coordinator.leases().claim(&name("k"), wish).await.unwrap().keep().0);
    assert!(coordinator.leader(name("s")).is_leader().await);
    drop(busy);
    coordinator.close().await;
    for kind in [Kind::Memory, Kind::Sqlite] {
        let world = World::new(kind).await;
        assert!(open(&world).await.pool().is_none());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn of_two_processes_one_leads_and_hands_over_when_it_closes() {
    let world = World::new(Kind::Postgres).await;
    let (one, two) = (open(&world).await, open(&world).await);
    let (first, second) = (one.leader(name("s")), two.leader(name("s")));
    assert_eq!((first.term().await, second.term().await), (None, None));
    assert!(first.is_leader().await);
    assert!(!second.is_leader().await);
    let term = first.term().await.unwrap();
    assert_eq!(second.term().await, None);
    for _ in 0..10 {
        assert!(first.is_leader().await && !second.is_leader().await);
    }
    assert_eq!(first.term().await, Some(term));
    let began = Instant::now();
    one.close().await;
    eventually(|| second.is_leader()).await;
    println!("figure: another process leads {:?} after close() began", began.elapsed());
    assert!(began.elapsed() < PROMPT);
    assert!(second.term().await.unwrap() > term);
    let held = two.leaders().gate(&name("s"), two.owner_id()).await.unwrap().outcome.unwrap();
    assert_eq!(Some(held.version), second.term().await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_closed_process_does_not_lead() {
    for kind in KINDS {
        let world = World::new(kind).await;
        let coordinator = open(&world).await;
        let leader = coordinator.leader(name("s"));
        assert!(leader.is_leader().await);
        coordinator.close().await;
        assert!(!leader.is_leader().await, "{kind:?}: the term was resigned");
        assert_eq!(leader.term().await, None, "{kind:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_that_resigns_hands_over() {
    let world = World::new(Kind::Postgres).await;
    let (one, two) = (open(&world).await, open(&world).await);
    let (first, second) = (one.leader(name("s")), two.leader(name("s")));
    assert!(first.is_leader().await && !second.is_leader().await);
    let term = first.term().await.unwrap();
    // Resigning what one does not lead ends nothing.
    second.resign().await.unwrap();
    assert!(one.leaders().gate(&name("s"), one.owner_id()).await.unwrap().outcome.is_some());
    let began = Instant::now();
    first.resign().await.unwrap();
    assert_eq!(first.term().await, None);
    assert!(second.is_leader().await);
    println!("figure: another process leads {:?} after resign() began", began.elapsed());
    assert!(!first.is_leader().await);
    assert!(second.term().await.unwrap() > term);
    first.resign().await.unwrap();
    assert!(second.is_leader().await);
    second.resign().await.unwrap();
    assert!(first.is_leader().await);
}

#[tokio::test(flavor = "multi_thread")]
async fn handles_of_one_name_agree() {
    let world = World::new(Kind::Postgres).await;
    let (one, two) = (open(&world).await, open(&world).await);
    let (first, again) = (one.leader(name("s")), one.clone().leader(name("s")));
    assert!(first.is_leader().await && again.is_leader().await);
    assert_eq!(first.term().await, again.term().await);
    // Other names are led for themselves.
    let elsewhere = two.leader(name("t"));
    assert!(elsewhere.is_leader().await && !one.leader(name("t")).is_leader().await);
    first.resign().await.unwrap();
    assert!(two.leader(name("s")).is_leader().await);
    assert!(!first.is_leader().await);
    assert!(!again.is_leader().await, "two processes are told that they lead");
    assert_eq!(again.term().await, None);
}

/// Cheap at every tick.
#[tokio::test(flavor = "multi_thread")]
async fn a_leader_asks_nobody_in_the_first_third_of_its_time() {
    let coordinator = Coordinator::open("memory:", CoordinatorOptions::default()).await.unwrap();
    let calls = || coordinator.options().metrics.batch_commands_count();
    let leader = coordinator.leader(name("s")).with_ttl(ttl(600_000));
    assert!(leader.is_leader().await);
    let before = calls();
    for _ in 0..1_000 {
        assert!(leader.is_leader().await);
    }
    assert_eq!(calls(), before);
}

trait Count {
    fn batch_commands_count(&self) -> String;
}

impl Count for fencepost::telemetry::Metrics {
    /// The line of `/metrics` that counts the batches.
    fn batch_commands_count(&self) -> String {
        let text = self.encode();
        let line = text.lines().find(|line| line.starts_with("fencepost_batch_commands_count"));
        line.unwrap().to_owned()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_leads_on_for_as_long_as_it_asks() {
    let world = World::new(Kind::Postgres).await;
    let (one, two) = (open(&world).await, open(&world).await);
    let first = one.leader(name("s")).with_ttl(ttl(3_000));
    let second = two.leader(name("s")).with_ttl(ttl(3_000));
    assert!(first.is_leader().await);
    let term = first.term().await.unwrap();
    let until = Instant::now() + Duration::from_secs(7);
    while Instant::now() < until {
        assert!(first.is_leader().await);
        assert!(!second.is_leader().await);
    }
    assert_eq!(first.term().await, Some(term));
}

/// Said when it starts, and not by the first statement that fails.
#[tokio::test(flavor = "multi_thread")]
async fn tables_of_another_build_are_refused_with_what_to_do() {
    for kind in [Kind::Sqlite, Kind::Postgres] {
        let world = World::new(kind).await;
        open(&world).await.close().await;
        if kind == Kind::Postgres {
            let mut database = world.database.as_ref().unwrap().connect().await;
            let change = "UPDATE fencepost.migrations SET checksum = '' WHERE version = 1";
            sqlx::raw_sql(change).execute(&mut database).await.unwrap();
        } else {
            let options = sqlx::sqlite::SqliteConnectOptions::new().filename(world.sqlite_file());
            let mut file = options.connect().await.unwrap();
            let change = "UPDATE _sqlx_migrations SET checksum = x'' WHERE version = 1";
            sqlx::raw_sql(change).execute(&mut file).await.unwrap();
            file.close().await.unwrap();
        }
        for migrate in [true, false] {
            let options = CoordinatorOptions { migrate, ..CoordinatorOptions::default() };
            match Coordinator::open(&world.url(), options).await {
                // A file is not asked for its migrations when they are off.
                Ok(opened) => {
                    assert!(kind == Kind::Sqlite && !migrate);
                    opened.close().await;
                }
                Err(OpenError::Configuration(reason)) => {
                    assert!(!migrate || reason.contains("migration 1"), "{reason}");
                }
                Err(error) => panic!("{error:?}"),
            }
        }
    }
}

/// A store of leases that can be taken away.
#[derive(Debug)]
struct Fickle {
    inner: Arc<dyn Store<LeaseMachine>>,
    is_away: AtomicBool,
}

impl Fickle {
    fn check(&self) -> Result<(), StoreError> {
        if self.is_away.load(Ordering::SeqCst) {
            return Err(StoreError::Away("away, for a test".into()));
        }
        Ok(())
    }
}

#[async_trait]
impl Store<LeaseMachine> for Fickle {
    async fn load(&self, lane: usize, keys: &[Key]) -> Result<Loaded<Lease>, StoreError> {
        self.check()?;
        self.inner.load(lane, keys).await
    }

    async fn store(&self, lane: usize, moment: Moment, writes: Arc<[Write<Lease>]>) -> Vec<Stored> {
        match self.check() {
            Ok(()) => self.inner.store(lane, moment, writes).await,
            Err(error) => writes.iter().map(|_| Stored::Failed(error.clone())).collect(),
        }
    }

    async fn list(&self, query: ListQuery) -> Result<Listed<Lease>, StoreError> {
        self.check()?;
        self.inner.list(query).await
    }
}

/// A leader that cannot ask stops before its time is over, and can lead again afterwards.
#[tokio::test(flavor = "multi_thread")]
async fn a_leader_whose_store_is_away_stops_before_another_can_begin() {
    let memory = Arc::new(MemoryStore::new());
    let fickle =
        Arc::new(Fickle { inner: Arc::clone(&memory) as _, is_away: AtomicBool::new(false) });
    let stores = |leases| Stores {
        backend: Arc::clone(&memory) as _,
        leases,
        records: Arc::clone(&memory) as _,
    };
    let on = |leases| {
        Coordinator::on(stores(leases), Arc::new(Hub::default()), CoordinatorOptions::default())
    };
    let (cut, well) = (on(Arc::clone(&fickle) as _), on(Arc::clone(&memory) as _));
    let first = cut.leader(name("s")).with_ttl(ttl(2_000));
    let second = well.leader(name("s")).with_ttl(ttl(2_000));
    assert!(first.is_leader().await && !second.is_leader().await);
    let term = first.term().await.unwrap();
    fickle.is_away.store(true, Ordering::SeqCst);
    // Both are asked all the time, each by itself.
    let last_yes = Mutex::new(Instant::now());
    let leaving = eventually(|| async {
        let asked = Instant::now();
        let leads = first.is_leader().await;
        if leads {
            *last_yes.lock().unwrap() = asked;
        }
        !leads
    });
    let taking = async {
        eventually(|| second.is_leader()).await;
        Instant::now()
    };
    let ((), took) = tokio::join!(leaving, taking);
    assert!(*last_yes.lock().unwrap() <= took, "both led");
    assert_eq!(first.term().await, None);
    assert!(second.term().await.unwrap() > term);
    fickle.is_away.store(false, Ordering::SeqCst);
    assert!(!first.is_leader().await);
    second.resign().await.unwrap();
    eventually(|| first.is_leader()).await;
}

/// A caller that gives up while its grant is on the way holds nothing.
#[tokio::test(flavor = "multi_thread")]
async fn a_reply_that_is_dropped_takes_its_grant_back_and_one_that_is_kept_does_not() {
    for kind in KINDS {
        let world = World::new(kind).await;
        let coordinator = open(&world).await;
        let (k, scope) = (name("k"), Scope::none());
        let (leases, executions) = (coordinator.leases(), coordinator.executions());
        let (records, leaders) = (coordinator.idempotency(), coordinator.leaders());
        let undone = || coordinator.options().metrics.undone_grants.get();
        let wish = ClaimLease::new(owner("a"), ttl(60_000));

        drop(leases.claim(&k, wish.clone()).await.unwrap());
        drop(executions.claim(&k, execution("a", Duration::ZERO)).await.unwrap());
        drop(records.claim(&scope, &k, write("a", None, 60_000)).await.unwrap());
        drop(leaders.campaign(&k, candidate("a", Duration::ZERO)).await.unwrap());
        eventually(|| async { undone() == 4 }).await;

        let kept = claimed(leases.claim(&k, wish.clone()).await.unwrap().keep().0);
        assert_eq!(kept.recovered_from, None);
        let run = executions.claim(&k, execution("a", Duration::ZERO)).await.unwrap();
        let run = granted(run.keep().0);
        assert_eq!(run.recovered_from, None);
        let claim = records.claim(&scope, &k, write("a", None, 60_000)).await.unwrap();
        let claim = granted(claim.keep().0);
        assert_eq!(claim.recovered_from, None);
        let term = leaders.campaign(&k, candidate("a", Duration::ZERO)).await.unwrap();
        let term = led(term.keep().0);
        // An extension is never taken back, nor is what somebody else was granted.
        drop(leaders.campaign(&k, candidate("a", Duration::ZERO)).await.unwrap());
        drop(leases.claim(&k, wish.clone()).await.unwrap());
        drop(executions.claim(&k, execution("b", Duration::ZERO)).await.unwrap());
        drop(records.claim(&scope, &k, write("b", None, 60_000)).await.unwrap());
        assert_eq!(leases.verify(&k, kept.version).await.unwrap(), Ok(()));
        let done = executions.complete(&k, reference(&run), "1".into()).await.unwrap().keep().0;
        assert_eq!(done, record::CompleteOutcome::Completed);
        let renewed = records.renew(&scope, &k, reference(&claim), None).await.unwrap().keep().0;
        assert!(matches!(renewed, record::RenewOutcome::Renewed(_)));
        let leading = leaders.gate(&k, &owner("a")).await.unwrap().outcome.unwrap();
        assert_eq!(leading.version, term.version);
        assert_eq!(undone(), 4);

        // Whoever names its attempt can ask again, so that its grant stays.
        let attempt = ClaimLease { attempt_id: Some(Uuid::from_u128(7)), ..wish };
        let other = name("other");
        drop(leases.claim(&other, attempt.clone()).await.unwrap());
        let again = leases.claim(&other, attempt).await.unwrap().keep().0;
        assert!(matches!(again, lease::ClaimOutcome::Claimed { repeated: true, .. }));
        coordinator.close().await;
    }
}

/// A batch that is given up at any moment, before, between or after its answers, leaves nothing held.
#[tokio::test(flavor = "multi_thread")]
async fn a_batch_of_claims_that_is_given_up_holds_nothing() {
    for kind in KINDS {
        let world = World::new(kind).await;
        let coordinator = open(&world).await;
        let executions = coordinator.executions();
        for round in 0..30 {
            let wish = |n| (name(&format!("{round}-{n}")), execution("a", Duration::ZERO));
            let patience = Duration::from_micros(rand::random_range(0..6_000));
            drop(timeout(patience, executions.claim_many((0..100).map(wish))).await);
        }
        eventually(|| async {
            let in_progress = |state| matches!(state, RecordState::InProgress { .. });
            executions.list(None, in_progress, None, 1_000).await.unwrap().items.is_empty()
        })
        .await;
        coordinator.close().await;
    }
}

/// What was lost before an undone claim is still lost after it, and is still the same write.
#[tokio::test(flavor = "multi_thread")]
async fn an_undone_claim_is_as_if_it_had_never_been() {
    for kind in KINDS {
        let world = World::new(kind).await;
        let coordinator = open(&world).await;
        let (records, scope) = (coordinator.idempotency(), Scope::none());
        let claim = async |key: &str, of: &str, fingerprint: &str, millis: i64| {
            let wish = write(of, Some(fingerprint), millis);
            records.claim(&scope, &name(key), wish).await.unwrap()
        };
        let mut lapsed = Vec::new();
        for key in ["k", "l"] {
            lapsed.push(granted(claim(key, "a", "f", 300).await.keep().0).version);
        }
        for key in ["k", "l"] {
            eventually(|| async {
                let (record, clock) = records.state(&scope, &name(key)).await.unwrap().keep();
                !record.unwrap().lease.is_held(clock.now)
            })
            .await;
            drop(claim(key, "b", "f", 60_000).await);
        }
        let undone = || coordinator.options().metrics.undone_grants.get();
        eventually(|| async { undone() == 2 }).await;
        let next = granted(claim("k", "c", "f", 60_000).await.keep().0);
        assert_eq!(next.recovered_from, Some(lapsed[0]), "{kind:?}");
        // A lapse keeps the fingerprint.
        let other = claim("l", "c", "g", 60_000).await.keep().0;
        assert_eq!(other, record::ClaimOutcome::Conflict, "{kind:?}");
        coordinator.close().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn draining_answers_all_that_wait_and_closing_finishes_what_was_begun() {
    for kind in KINDS {
        let world = World::new(kind).await;
        let coordinator = open(&world).await;
        let (k, wait) = (name("k"), Duration::from_secs(50));
        let run = coordinator.executions().claim(&k, execution("a", Duration::ZERO)).await.unwrap();
        let run = granted(run.keep().0);
        let term =
            coordinator.leaders().campaign(&k, candidate("a", Duration::ZERO)).await.unwrap();
        let term: Version = led(term.keep().0).version;
        let mut waits = JoinSet::new();
        for n in 0..6 {
            let (coordinator, k) = (coordinator.clone(), k.clone());
            waits.spawn(async move {
                let leaders = coordinator.leaders();
                match n % 3 {
                    0 => coordinator.executions().claim(&k, execution("b", wait)).await.err(),
                    1 => leaders.campaign(&k, candidate("b", wait)).await.err(),
                    _ => leaders.wait(&k, Some(term), wait).await.err(),
                }
            });
        }
        eventually(|| async { coordinator.options().metrics.waiters.get() == 6 }).await;
        let began = Instant::now();
        assert!(!coordinator.is_draining());
        coordinator.drain();
        assert!(coordinator.is_draining());
        for error in waits.join_all().await {
            assert!(matches!(error, Some(EngineError::ShuttingDown)), "{kind:?} {error:?}");
        }
        assert!(began.elapsed() < PROMPT);
        let completing = coordinator.executions().complete(&k, reference(&run), "1".into()).await;
        assert_eq!(completing.unwrap().keep().0, record::CompleteOutcome::Completed);
        coordinator.close().await;
        let late = coordinator.executions().complete(&k, reference(&run), "1".into()).await;
        assert!(matches!(late, Err(EngineError::ShuttingDown)), "{kind:?} {late:?}");
        // Closing twice is closing once.
        coordinator.close().await;
    }
}

/// Those who wait sleep: each reads when it comes and when it goes, and in between each watched
/// key is read once in a while, for all of them.
#[tokio::test(flavor = "multi_thread")]
async fn waiting_costs_next_to_nothing_while_nothing_changes() {
    const WAITERS: u64 = 50;
    let coordinator = Coordinator::open("memory:", CoordinatorOptions::default()).await.unwrap();
    let (k, wait) = (name("k"), Duration::from_secs(5));
    coordinator.executions().claim(&k, execution("a", Duration::ZERO)).await.unwrap().keep();
    let term = coordinator.leaders().campaign(&k, candidate("a", Duration::ZERO)).await.unwrap();
    let term = led(term.keep().0).version;
    let mut waits = JoinSet::new();
    for _ in 0..WAITERS {
        let (coordinator, k) = (coordinator.clone(), k.clone());
        waits.spawn(async move {
            let claim = coordinator.executions().claim(&k, execution("b", wait)).await.unwrap();
            assert!(matches!(claim.outcome, record::ClaimOutcome::InProgress(_)));
        });
    }
    for _ in 0..WAITERS {
        let (coordinator, k) = (coordinator.clone(), k.clone());
        waits.spawn(async move {
            let waited = coordinator.leaders().wait(&k, Some(term), wait).await.unwrap();
            assert!(matches!(waited.outcome, WaitOutcome::TimedOut(_)));
        });
    }
    waits.join_all().await;
    let text = coordinator.options().metrics.encode();
    let sum = text.lines().find_map(|line| line.strip_prefix("fencepost_batch_commands_sum "));
    let commands: f64 = sum.unwrap().parse().unwrap();
    println!("figure: {} waits of {wait:?} took {commands} commands", 2 * WAITERS);
    // Two for each of them, and a few polls.
    assert!(commands <= (2 * 2 * WAITERS + 30) as f64, "{commands}");
}
