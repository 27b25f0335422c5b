//! Clocks that jump: leases end early at worst, and are never extended, revived or confused.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, Instant};

use fencepost::coordinator::{Coordinator, CoordinatorOptions, Stores};
use fencepost::domain::time::Timestamp;
use fencepost::engine::Hub;
use fencepost::store::clock::TimeSource;
use fencepost::store::memory::MemoryStore;
use fencepost::store::sqlite::SqliteStore;

use crate::rig::{self, wall_ms};
use crate::support::{Kind, Service, World};

const HOUR_MS: i64 = 3_600_000;
/// Where a double can no longer count microseconds.
const BOGUS_MICROS: i64 = (1 << 53) + 1_000_000;

/// A wall clock that can be set, beside a monotonic one that cannot.
#[derive(Clone, Debug, Default)]
struct Clock {
    ahead_ms: Arc<AtomicI64>,
    /// What the wall clock says regardless, if not 0.
    bogus_micros: Arc<AtomicI64>,
}

impl Clock {
    fn step_ms(&self, by: i64) {
        self.ahead_ms.fetch_add(by, Ordering::Relaxed);
    }

    fn set_bogus(&self, micros: i64) {
        self.bogus_micros.store(micros, Ordering::Relaxed);
    }

    fn source(&self) -> TimeSource {
        let (clock, start) = (self.clone(), Instant::now());
        let wall = move || {
            let bogus = clock.bogus_micros.load(Ordering::Relaxed);
            let ahead_ms = clock.ahead_ms.load(Ordering::Relaxed);
            Timestamp::from_micros(if bogus == 0 { (wall_ms() + ahead_ms) * 1_000 } else { bogus })
        };
        TimeSource::new(wall, move || start.elapsed())
    }
}

fn often_cleaned() -> CoordinatorOptions {
    CoordinatorOptions {
        cleanup_interval: Duration::from_millis(5),
        ..CoordinatorOptions::default()
    }
}

/// Starts a service whose store goes by this clock.
async fn serve(world: &World, clock: &Clock, options: CoordinatorOptions) -> Service {
    let hub = Arc::new(Hub::default());
    let coordinator = match world.kind {
        Kind::Memory => {
            let store = MemoryStore::with_time(clock.source());
            Coordinator::on(Stores::of(store), hub, options.clone())
        }
        Kind::Sqlite => {
            let file = world.sqlite_file();
            let store = SqliteStore::open_with_time(&file, true, clock.source()).await.unwrap();
            Coordinator::on(Stores::of(store), hub, options.clone())
        }
        Kind::Postgres => panic!("its clock is the database's"),
    };
    Service::on(coordinator, options.metrics).await
}

async fn ends_leases_when_set_forward(kind: Kind) {
    let _alone = rig::alone().await;
    let (world, clock) = (World::new(kind).await, Clock::default());
    let service = serve(&world, &clock, CoordinatorOptions::default()).await;
    let version = service.claim("k", "a", 1_800_000).await.expect("claimed").version();
    let parked = service.client.clone();
    let parked = tokio::spawn(async move { parked.wait("k", Some(version), 3_000).await });
    service.until_waiters(1).await;
    clock.step_ms(HOUR_MS);
    service.renew("k", "a", version).await.expect_stale("expired");
    let told = service.wait("k", Some(version), 1_000).await.expect("released");
    assert_eq!(told.reason(), "expired");
    let parked = parked.await.unwrap().expect("released");
    assert_eq!(parked.reason(), "expired");
    let next = service.claim("k", "b", 30_000).await.expect("claimed");
    assert_eq!(next.body["recovered"], true);
    assert!(next.version() > version);
    println!("figure: {kind:?}, clock one hour ahead: the lease is over, for parked waits as well");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_clock_set_forward_ends_leases_on_memory() {
    ends_leases_when_set_forward(Kind::Memory).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_clock_set_forward_ends_leases_on_sqlite() {
    ends_leases_when_set_forward(Kind::Sqlite).await;
}

async fn neither_extends_nor_revives_when_set_back(kind: Kind) {
    let _alone = rig::alone().await;
    let (world, clock) = (World::new(kind).await, Clock::default());
    let service = serve(&world, &clock, CoordinatorOptions::default()).await;
    let over = service.claim("over", "a", 100).await.expect("claimed").version();
    service.until_expired("over", over).await;
    let claimed = Instant::now();
    let held = service.claim("held", "a", 1_500).await.expect("claimed").version();
    clock.step_ms(-HOUR_MS);
    service.renew("over", "a", over).await.expect_stale("expired");
    let remaining = service.state("held").await["expires_in_ms"].as_i64().unwrap();
    assert!(remaining <= 1_500, "extended to {remaining} ms");
    service.until_expired("held", held).await;
    let lived = claimed.elapsed();
    service.renew("held", "a", held).await.expect_stale("expired");
    let next = service.claim("held", "b", 30_000).await.expect("claimed").version();
    println!(
        "figure: {kind:?}, clock one hour back: a lease of 1,500 ms lived {} ms, the next version \
         is {} higher",
        lived.as_millis(),
        next - held,
    );
    assert!(lived >= Duration::from_millis(1_490) && lived < Duration::from_secs(4));
    assert!(next > held);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_clock_set_back_neither_extends_nor_revives_on_memory() {
    neither_extends_nor_revives_when_set_back(Kind::Memory).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_clock_set_back_neither_extends_nor_revives_on_sqlite() {
    neither_extends_nor_revives_when_set_back(Kind::Sqlite).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_with_the_clock_set_back_keeps_versions_rising() {
    let _alone = rig::alone().await;
    let (world, clock) = (World::new(Kind::Sqlite).await, Clock::default());
    let forgetful = CoordinatorOptions { idle_key_retention: Duration::ZERO, ..often_cleaned() };
    let service = serve(&world, &clock, forgetful.clone()).await;
    // One key that clean-up forgets, and one that is held over the restart.
    let gone = service.claim("gone", "a", 30_000).await.expect("claimed").version();
    service.release("gone", "a", gone).await.expect("released");
    crate::support::eventually(|| async {
        service.metric("fencepost_cleaned_keys_total").await > 0.0
    })
    .await;
    let claimed = Instant::now();
    let held = service.claim("held", "a", 1_500).await.expect("claimed").version();
    service.stop().await;

    clock.step_ms(-HOUR_MS);
    let service = serve(&world, &clock, forgetful).await;
    let refused = service.claim("held", "b", 30_000).await.expect("held");
    assert_eq!(refused.body["holder"]["version"], held);
    let back = service.claim("gone", "a", 30_000).await.expect("claimed").version();
    service.until_expired("held", held).await;
    let lived = claimed.elapsed();
    let next = service.claim("held", "b", 30_000).await.expect("claimed").version();
    println!(
        "figure: Sqlite, restarted with the clock one hour back: a lease of 1,500 ms lived {} ms, \
         the next version of a held key is {} higher, that of a forgotten one {} higher",
        lived.as_millis(),
        next - held,
        back - gone,
    );
    assert!(lived < Duration::from_secs(5), "the step back extended the lease");
    assert!(next > held && back > gone);
}

/// While the clock is out of all bounds, nothing is granted, written or deleted.
async fn refuse_while_bogus(service: &Service, held: i64) {
    for key in ["held", "free", "new"] {
        let refused = service.claim(key, "b", 30_000).await;
        assert_eq!((refused.status, refused.outcome()), (503, "unavailable"), "{refused:#?}");
    }
    let refused = service.renew("held", "a", held).await;
    assert_eq!((refused.status, refused.outcome()), (503, "unavailable"), "{refused:#?}");
}

async fn works_again_after(service: &Service, held: i64, free: i64) {
    let state = service.state("held").await;
    assert_eq!((&state["state"], state["version"].as_i64()), (&"held".into(), Some(held)));
    service.renew("held", "a", held).await.expect("renewed");
    for (key, before) in [("free", free), ("new", 0)] {
        let version = service.claim(key, "b", 30_000).await.expect("claimed").version();
        assert!(version > before && version < 1 << 52, "{version}");
    }
}

async fn starts_bogus_and_recovers(kind: Kind, options: CoordinatorOptions) {
    let _alone = rig::alone().await;
    let (world, clock) = (World::new(kind).await, Clock::default());
    let service = serve(&world, &clock, options).await;
    let held = service.claim("held", "a", 600_000).await.expect("claimed").version();
    let free = service.claim("free", "a", 600_000).await.expect("claimed").version();
    service.release("free", "a", free).await.expect("released");
    clock.set_bogus(BOGUS_MICROS);
    refuse_while_bogus(&service, held).await;
    clock.set_bogus(0);
    println!("figure: {kind:?}, clock beyond 2^53 µs: every claim and renewal is refused with 503");
    works_again_after(&service, held, free).await;
    println!("figure: {kind:?}, clock back from beyond 2^53 µs: the keys work, the lease is held");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bogus_clock_writes_nothing_on_memory() {
    starts_bogus_and_recovers(Kind::Memory, CoordinatorOptions::default()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bogus_clock_writes_nothing_on_sqlite() {
    starts_bogus_and_recovers(Kind::Sqlite, CoordinatorOptions::default()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bogus_clock_does_not_make_clean_up_delete_leases_on_memory() {
    starts_bogus_and_recovers(Kind::Memory, often_cleaned()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bogus_clock_does_not_make_clean_up_delete_leases_on_sqlite() {
    starts_bogus_and_recovers(Kind::Sqlite, often_cleaned()).await;
}

async fn restarts_after_a_bogus_clock(options: CoordinatorOptions, what: &str) {
    let _alone = rig::alone().await;
    let (world, clock) = (World::new(Kind::Sqlite).await, Clock::default());
    let service = serve(&world, &clock, options).await;
    let held = service.claim("held", "a", 600_000).await.expect("claimed").version();
    let free = service.claim("free", "a", 600_000).await.expect("claimed").version();
    service.release("free", "a", free).await.expect("released");
    clock.set_bogus(BOGUS_MICROS);
    refuse_while_bogus(&service, held).await;
    // It stays like that for a while.
    tokio::time::sleep(Duration::from_millis(200)).await;
    let deleted = service.metric("fencepost_cleaned_keys_total").await;
    service.stop().await;
    clock.set_bogus(0);
    let service = serve(&world, &clock, CoordinatorOptions::default()).await;
    println!(
        "figure: Sqlite, restarted after a clock beyond 2^53 µs, {what}: {deleted} keys deleted \
         meanwhile, the lease is {}",
        service.state("held").await["state"],
    );
    works_again_after(&service, held, free).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_after_a_bogus_clock_finds_everything_as_it_was() {
    restarts_after_a_bogus_clock(CoordinatorOptions::default(), "no clean-up").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_after_a_bogus_clock_finds_what_clean_up_had_to_leave() {
    restarts_after_a_bogus_clock(often_cleaned(), "clean-up running").await;
}
