//! Two replicas that write overlapping batches in different orders never deadlock.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use fencepost::coordinator::{ClaimLease, CoordinatorOptions};
use fencepost::domain::ids::{Name, OwnerId};
use fencepost::domain::time::Ttl;
use fencepost::http::App;
use futures_util::future::join_all;
use rand::seq::SliceRandom as _;
use serde_json::{Value, json};
use tokio::sync::Barrier;
use tokio::time::timeout;

use crate::rig;
use crate::support::{Client, Kind, World};

const TASKS: usize = 8;
const KEYS: usize = 60;
/// Keys that all tasks of [`renew_fleet`] renew, all at once.
const FLEET: usize = 400;
/// New keys that two tasks of [`claim_herd`] claim at the same moment, on two replicas.
const HERD: usize = 400;
const RUN_FOR: Duration = Duration::from_secs(30);

/// What the calls of one task came to.
#[derive(Debug, Default)]
struct Tally {
    claims: usize,
    renewals: usize,
    releases: usize,
    /// The slowest call of the fleet or the herd.
    slowest: Duration,
    /// Replies of 5xx, or items that were not answered.
    failures: Vec<String>,
}

impl Tally {
    fn note(&mut self, what: &str, status: u16, text: &str) {
        if status >= 500 {
            self.failures.push(format!("{what}: {text}"));
        }
    }
}

/// Claims, renews and releases many keys at a time, each time in another order. Most keys are
/// shared with all other tasks; some are new each round.
async fn churn(clients: Vec<Client>, number: usize, end: Instant) -> Tally {
    let owner = format!("owner-{number}");
    let mut tally = Tally::default();
    let mut held: HashMap<String, i64> = HashMap::new();
    let mut round = 0;
    while Instant::now() < end {
        round += 1;
        let client = &clients[rand::random_range(0..clients.len())];
        let mut keys: Vec<String> = (0..KEYS).map(|i| format!("shared-{i:02}")).collect();
        keys.extend((0..6).map(|i| format!("new-{}-{i}", round / 4)));
        keys.shuffle(&mut rand::rng());
        keys.truncate(24);
        let claims = keys.iter().map(|key| {
            let ttl_ms = rand::random_range(400..1_200);
            client.claim(key, &owner, ttl_ms)
        });
        for (key, reply) in keys.iter().zip(join_all(claims).await) {
            tally.claims += 1;
            tally.note("claim", reply.status, &reply.text);
            if reply.outcome() == "claimed" {
                held.insert(key.clone(), reply.version());
            }
        }
        if held.is_empty() {
            continue;
        }
        let mut items: Vec<(String, i64)> = held.clone().into_iter().collect();
        items.shuffle(&mut rand::rng());
        let client = &clients[rand::random_range(0..clients.len())];
        let listed: Vec<Value> =
            items.iter().map(|(key, version)| json!({"key": key, "version": version})).collect();
        let body = json!({"owner_id": owner, "ttl_ms": 400, "items": listed});
        let reply = client.post("/v1/leases/renew-many", body).await;
        tally.note("renew-many", reply.status, &reply.text);
        let results = reply.body["results"].as_array().into_iter().flatten();
        for (item, result) in items.iter().zip(results) {
            tally.renewals += 1;
            match result["outcome"].as_str() {
                Some("renewed") => {}
                Some("stale_lease") => {
                    held.remove(&item.0);
                }
                other => tally.failures.push(format!("an item of renew-many: {other:?}")),
            }
        }
        items.shuffle(&mut rand::rng());
        items.truncate(items.len() / 2);
        let releases = items.iter().map(|(key, version)| client.release(key, &owner, *version));
        for (item, reply) in items.iter().zip(join_all(releases).await) {
            tally.releases += 1;
            tally.note("release", reply.status, &reply.text);
            held.remove(&item.0);
        }
    }
    tally
}

/// Renews the same leases as other tasks do at the same time, each time in another order.
async fn renew_fleet(client: Client, mut fleet: Vec<Value>, end: Instant) -> Tally {
    let mut tally = Tally::default();
    while Instant::now() < end {
        fleet.shuffle(&mut rand::rng());
        let body = json!({"owner_id": "fleet", "items": fleet});
        let sent = Instant::now();
        let reply = client.post("/v1/leases/renew-many", body).await;
        tally.slowest = tally.slowest.max(sent.elapsed());
        tally.note("renew-many of the fleet", reply.status, &reply.text);
        for result in reply.body["results"].as_array().into_iter().flatten() {
            tally.renewals += 1;
            if result["outcome"] != "renewed" {
                tally.failures.push(format!("an item of the fleet: {result}"));
            }
        }
    }
    tally
}

/// Claims new keys in step with a task on the other replica, in another order. Without HTTP, so
/// that they are inserted in few, large batches.
async fn claim_herd(
    app: Arc<App>,
    step: Arc<Barrier>,
    is_over: Arc<AtomicBool>,
    end: Instant,
) -> Tally {
    let leases = app.coordinator.leases();
    let mut tally = Tally::default();
    for round in 0.. {
        // One of them decides for both whether this is the end.
        if step.wait().await.is_leader() {
            is_over.store(Instant::now() >= end, Ordering::SeqCst);
        }
        step.wait().await;
        if is_over.load(Ordering::SeqCst) {
            break;
        }
        let mut keys: Vec<String> = (0..HERD).map(|i| format!("herd-{round}-{i:03}")).collect();
        keys.shuffle(&mut rand::rng());
        let claims = keys.into_iter().map(|key| {
            let request = ClaimLease {
                owner_id: OwnerId::new("herd").unwrap(),
                ttl: Ttl::from_millis(2_000).unwrap(),
                attempt_id: None,
                metadata: None,
                wait: Duration::ZERO,
            };
            async move { leases.claim(&Name::new(key).unwrap(), request).await }
        });
        let sent = Instant::now();
        let replies = join_all(claims).await;
        tally.slowest = tally.slowest.max(sent.elapsed());
        for reply in replies {
            tally.claims += 1;
            match reply {
                Ok(reply) => drop(reply.keep()),
                Err(error) => tally.failures.push(format!("claim of a herd: {error}")),
            }
        }
    }
    tally
}

const DEADLOCKS: &str = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()";

#[tokio::test(flavor = "multi_thread")]
async fn overlapping_batches_never_deadlock() {
    let _alone = rig::alone().await;
    let world = World::new(Kind::Postgres).await;
    let database = world.database.as_ref().unwrap();
    // The service gives up on a lock after 50 ms, before Postgres would look for a deadlock; it is
    // made to look earlier, so that one would be counted.
    database
        .execute(
            "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET deadlock_timeout = ''5ms''',
             current_database()); END $$",
        )
        .await;
    let options = CoordinatorOptions {
        idle_key_retention: Duration::from_millis(50),
        cleanup_interval: Duration::from_millis(10),
        ..CoordinatorOptions::default()
    };
    let services = rig::replicas(&world, &options, None).await;
    let clients: Vec<Client> = services.iter().map(|service| service.client.clone()).collect();
    let before = database.number(DEADLOCKS).await;
    let end = Instant::now() + RUN_FOR;
    let mut tasks: Vec<_> =
        (0..TASKS).map(|number| tokio::spawn(churn(clients.clone(), number, end))).collect();
    let mut fleet = Vec::new();
    for number in 0..FLEET {
        let key = format!("fleet-{number}");
        let version = clients[0].claim(&key, "fleet", 60_000).await.expect("claimed").version();
        fleet.push(json!({"key": key, "version": version}));
    }
    let herd_over = Arc::new(AtomicBool::new(false));
    let step = Arc::new(Barrier::new(clients.len()));
    for service in &services {
        for _ in 0..2 {
            tasks.push(tokio::spawn(renew_fleet(service.client.clone(), fleet.clone(), end)));
        }
        tasks.push(tokio::spawn(claim_herd(
            Arc::clone(&service.app),
            Arc::clone(&step),
            Arc::clone(&herd_over),
            end,
        )));
    }
    let mut total = Tally::default();
    for task in tasks {
        let tally = timeout(RUN_FOR * 3, task).await.expect("a task hangs").unwrap();
        total.claims += tally.claims;
        total.renewals += tally.renewals;
        total.releases += tally.releases;
        total.slowest = total.slowest.max(tally.slowest);
        total.failures.extend(tally.failures);
    }
    let (mut retries, mut deleted, mut refused) = (0.0, 0.0, 0.0);
    for service in &services {
        retries += service.metric("fencepost_write_retries_total").await;
        deleted += service.metric("fencepost_cleaned_keys_total").await;
        let name = r#"fencepost_store_failures_total{operation="store",failure="refused"}"#;
        let metric = service.metric(name).await;
        refused += if metric.is_nan() { 0.0 } else { metric };
    }
    // A session reports what it has counted at the latest when it ends.
    for service in services {
        service.stop().await;
    }
    let deadlocks = database.number(DEADLOCKS).await - before;
    println!(
        "figure: two replicas for {} s: {} operations ({} claims, {} renewals, {} releases), \
         {retries} writes retried, {refused} refused, {deleted} keys deleted, \
         {deadlocks} deadlocks, {} failures; the slowest call for {FLEET} keys took {} ms",
        RUN_FOR.as_secs(),
        total.claims + total.renewals + total.releases,
        total.claims,
        total.renewals,
        total.releases,
        total.failures.len(),
        total.slowest.as_millis(),
    );
    assert_eq!(deadlocks, 0);
    assert!(total.failures.is_empty(), "{:#?}", &total.failures[..total.failures.len().min(5)]);
    assert!(total.renewals > 1_000 && deleted > 0.0, "too little happened to prove anything");
}
