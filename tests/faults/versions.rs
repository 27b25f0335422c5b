//! Versions rise and holds do not overlap, while clean-up deletes the key at every chance.

use std::time::{Duration, Instant};

use fencepost::coordinator::CoordinatorOptions;
use serde_json::json;
use tokio::time::sleep;

use crate::rig::{self, Faults, Grant, History, Refusal};
use crate::support::{Client, Kind, World};

const CLIENTS: usize = 16;
const RUN_FOR: Duration = Duration::from_secs(10);

/// Claims and gives back one key for as long as the run lasts. Now and then the lease is left to
/// lapse; every other client stands in line instead of asking again at once.
async fn claim_and_release(client: Client, number: usize, end: Instant) -> History {
    let owner = format!("client-{number}");
    let (mut grants, mut refusals) = (Vec::new(), Vec::new());
    let wait_ms = if number.is_multiple_of(2) { 0 } else { 500 };
    while Instant::now() < end {
        let lapses = rand::random_range(0..200) == 0;
        let ttl_ms = if lapses { 100 } else { 20_000 };
        let invoked = Instant::now();
        let claim = json!({"key": "k", "owner_id": owner, "ttl_ms": ttl_ms, "wait_ms": wait_ms});
        let reply = client.post("/v1/leases/claim", claim).await;
        match reply.outcome() {
            "claimed" => {
                let mut grant = Grant::new(invoked, &reply);
                if !lapses {
                    grant.release_invoked = Some(Instant::now());
                    client.release("k", &owner, grant.version).await.expect("released");
                }
                grants.push(grant);
            }
            "held" => {
                let version = reply.body["holder"]["version"].as_i64().unwrap();
                refusals.push(Refusal { invoked, version });
                // As a client would: 16 that ask without a pause only measure themselves.
                sleep(Duration::from_millis(rand::random_range(0..3))).await;
            }
            other => panic!("{other}: {reply:#?}"),
        }
    }
    History {
        grants: [("k".to_owned(), grants)].into(),
        refusals: [("k".to_owned(), refusals)].into(),
    }
}

async fn race(kind: Kind, delay: Option<Duration>) {
    let _alone = rig::alone().await;
    let world = World::new(kind).await;
    let options = CoordinatorOptions {
        idle_key_retention: Duration::ZERO,
        cleanup_interval: Duration::from_millis(1),
        ..CoordinatorOptions::default()
    };
    let services = rig::replicas(&world, &options, delay).await;
    let end = Instant::now() + RUN_FOR;
    let clients: Vec<_> = (0..CLIENTS)
        .map(|number| {
            let client = services[number % services.len()].client.clone();
            tokio::spawn(claim_and_release(client, number, end))
        })
        .collect();
    let mut history = History::default();
    for client in clients {
        history.add(client.await.unwrap());
    }
    let mut deleted = 0.0;
    for service in &services {
        deleted += service.metric("fencepost_cleaned_keys_total").await;
    }
    let faults = history.check();
    println!(
        "figure: versions on {kind:?}, {} replica(s), {} ms at most between load and store: \
         {} grants, {} refusals, {} regressions, {} overlaps, {deleted} keys deleted",
        services.len(),
        delay.unwrap_or_default().as_millis(),
        history.count(),
        history.refusals["k"].len(),
        faults.regressions,
        faults.overlaps,
    );
    assert_eq!(faults, Faults::default());
    assert!(history.count() > 100, "too few grants to prove anything");
    assert!(deleted > 0.0, "clean-up deleted nothing");
    for service in services {
        service.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn versions_rise_on_memory() {
    race(Kind::Memory, None).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn versions_rise_on_sqlite() {
    race(Kind::Sqlite, None).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn versions_rise_on_postgres() {
    race(Kind::Postgres, None).await;
}

const DELAY: Option<Duration> = Some(Duration::from_millis(20));

#[tokio::test(flavor = "multi_thread")]
async fn versions_rise_on_a_slow_memory() {
    race(Kind::Memory, DELAY).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn versions_rise_on_a_slow_sqlite() {
    race(Kind::Sqlite, DELAY).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn versions_rise_on_a_slow_postgres() {
    race(Kind::Postgres, DELAY).await;
}
