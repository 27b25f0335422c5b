//! What was told to be over never lives again, and what holds is never told to be over.

use std::time::{Duration, Instant};

use fencepost::coordinator::{ClaimLease, CoordinatorOptions, WaitOutcome};
use fencepost::domain::ids::{Name, OwnerId};
use fencepost::domain::lease::ClaimOutcome;
use fencepost::domain::time::Ttl;
use fencepost::domain::version::Version;
use serde_json::{Value, json};
use tokio::time::sleep;

use crate::rig::{self, expires_at, wall_ms};
use crate::support::{Client, Kind, Reply, Service, World};

const KEYS: usize = 16;
const RUN_FOR: Duration = Duration::from_secs(12);

/// What the holders and followers of one key saw.
#[derive(Debug, Default)]
struct Seen {
    generations: usize,
    renewed: usize,
    refused: usize,
    /// Generations that were renewed, or still held the key, after a follower was told of their
    /// end.
    revived: usize,
    /// Ends told before the end that a holder had been promised.
    early: usize,
}

/// Waits for the end of a generation, then tries at once to renew it: when that was told, by both
/// clocks, and whether the renewal succeeded.
async fn follow(client: Client, key: String, version: i64) -> (Instant, i64, bool) {
    let reply = client.wait(&key, Some(version), 10_000).await.expect("released");
    let (told, told_at) = (Instant::now(), wall_ms());
    assert_eq!(reply.reason(), "expired");
    let revived = client.renew(&key, "holder", version).await;
    assert!(matches!(revived.status, 200 | 409), "{revived:#?}");
    (told, told_at, revived.status == 200)
}

async fn renew_for(client: &Client, key: &str, version: i64, ttl_ms: i64) -> Reply {
    let body = json!({"key": key, "owner_id": "holder", "version": version, "ttl_ms": ttl_ms});
    client.post("/v1/leases/renew", body).await
}

/// One generation after another, each renewed at the last moment until that fails.
async fn hold_and_follow(clients: Vec<Client>, key: String, end: Instant) -> Seen {
    let mut seen = Seen::default();
    while Instant::now() < end {
        let claimed = clients[seen.generations % clients.len()].claim(&key, "holder", 250).await;
        if claimed.outcome() == "held" {
            // The generation before this one, which was told to be over.
            seen.revived += 1;
            let version = claimed.body["holder"]["version"].as_i64();
            clients[0].wait(&key, version, 10_000).await.expect("released");
            continue;
        }
        let claimed = claimed.expect("claimed");
        let (mut promised, version) = (expires_at(&claimed), claimed.version());
        let followers: Vec<_> = clients
            .iter()
            .map(|client| tokio::spawn(follow(client.clone(), key.clone(), version)))
            .collect();
        let mut last_success = None;
        for _ in 0..3 {
            // To be at the store within ten milliseconds of the end, before or after.
            let until_end = promised - wall_ms() + rand::random_range(-14..8);
            sleep(Duration::from_millis(u64::try_from(until_end).unwrap_or(0))).await;
            let client = &clients[rand::random_range(0..clients.len())];
            let reply = renew_for(client, &key, version, rand::random_range(200..300)).await;
            if reply.status != 200 {
                reply.expect_stale("expired");
                seen.refused += 1;
                break;
            }
            seen.renewed += 1;
            last_success = Some(Instant::now());
            promised = promised.max(expires_at(&reply));
        }
        for follower in followers {
            let (told, told_at, revived) = follower.await.unwrap();
            let is_late_success = last_success.is_some_and(|success| success > told);
            seen.revived += usize::from(revived || is_late_success);
            seen.early += usize::from(told_at < promised);
        }
        seen.generations += 1;
    }
    seen
}

async fn never_lives_again(kind: Kind) {
    let _alone = rig::alone().await;
    let world = World::new(kind).await;
    let delay = Some(Duration::from_millis(10));
    let services = rig::replicas(&world, &CoordinatorOptions::default(), delay).await;
    // Two followers, on two replicas where there are two.
    let clients: Vec<Client> =
        (0..2).map(|i| services[i % services.len()].client.clone()).collect();
    let end = Instant::now() + RUN_FOR;
    let keys: Vec<_> = (0..KEYS)
        .map(|i| tokio::spawn(hold_and_follow(clients.clone(), format!("key-{i}"), end)))
        .collect();
    let mut seen = Seen::default();
    for key in keys {
        let one = key.await.unwrap();
        seen.generations += one.generations;
        seen.renewed += one.renewed;
        seen.refused += one.refused;
        seen.revived += one.revived;
        seen.early += one.early;
    }
    println!(
        "figure: expiry on {kind:?}, {} replica(s): {} generations told over by {} followers, \
         last-moment renewals {} renewed and {} refused, {} revived, {} told early",
        services.len(),
        seen.generations,
        clients.len(),
        seen.renewed,
        seen.refused,
        seen.revived,
        seen.early,
    );
    assert_eq!((seen.revived, seen.early), (0, 0));
    assert!(seen.generations >= 200, "too few generations to prove anything");
    assert!(seen.renewed >= 50 && seen.refused >= 50, "the renewals did not race the end");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_told_over_never_lives_again_on_memory() {
    never_lives_again(Kind::Memory).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_told_over_never_lives_again_on_sqlite() {
    never_lives_again(Kind::Sqlite).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_told_over_never_lives_again_on_postgres() {
    never_lives_again(Kind::Postgres).await;
}

const LOAD: usize = 5_000;

fn name(number: usize) -> Name {
    Name::new(format!("key-{number}")).unwrap()
}

/// Claims keys all at once, without HTTP, so that they meet in one batch.
async fn claim_all(service: &Service) -> Vec<Version> {
    let claims: Vec<_> = (0..LOAD)
        .map(|number| {
            let app = service.app.clone();
            tokio::spawn(async move {
                let request = ClaimLease {
                    owner_id: OwnerId::new("holder").unwrap(),
                    ttl: Ttl::from_millis(60_000).unwrap(),
                    attempt_id: None,
                    metadata: None,
                    wait: Duration::ZERO,
                };
                let leases = app.coordinator.leases();
                match leases.claim(&name(number), request).await.unwrap().keep().0 {
                    ClaimOutcome::Claimed { lease, .. } => lease.version,
                    other => panic!("{other:?}"),
                }
            })
        })
        .collect();
    let mut versions = Vec::with_capacity(LOAD);
    for claim in claims {
        versions.push(claim.await.unwrap());
    }
    versions
}

/// Waits for all at once: how many timed out, were told to be over, and got no answer.
async fn wait_for_all(service: &Service, versions: &[Version]) -> (usize, usize, usize) {
    let waits: Vec<_> = versions
        .iter()
        .enumerate()
        .map(|(number, &version)| {
            let app = service.app.clone();
            tokio::spawn(async move {
                let wait = Duration::from_millis(300);
                let leases = app.coordinator.leases();
                let reply = leases.wait(&name(number), Some(version), wait).await;
                reply.map(|reply| reply.keep().0)
            })
        })
        .collect();
    let (mut timed_out, mut over, mut unanswered) = (0, 0, 0);
    for wait in waits {
        match wait.await.unwrap() {
            Ok(WaitOutcome::TimedOut(_)) => timed_out += 1,
            Ok(WaitOutcome::Over(_)) => over += 1,
            Err(_) => unanswered += 1,
        }
    }
    (timed_out, over, unanswered)
}

/// How many of a thousand keys were renewed.
async fn renew_thousand(client: Client, first: usize, versions: Vec<Version>) -> usize {
    let items: Vec<Value> = (first..first + 1_000)
        .map(|number| json!({"key": name(number).as_str(), "version": versions[number].get()}))
        .collect();
    let body = json!({"owner_id": "holder", "items": items});
    let reply = client.post("/v1/leases/renew-many", body).await;
    assert_eq!(reply.status, 200, "{reply:#?}");
    let results = reply.body["results"].as_array().unwrap();
    results.iter().filter(|result| result["outcome"] == "renewed").count()
}

async fn what_holds_is_never_told_over(kind: Kind) {
    let _alone = rig::alone().await;
    let service = Service::start(kind).await;
    let versions = claim_all(&service).await;
    let started = Instant::now();
    let (timed_out, over, unanswered) = wait_for_all(&service, &versions).await;
    let waited = started.elapsed();
    let started = Instant::now();
    let renewals: Vec<_> = (0..LOAD)
        .step_by(1_000)
        .map(|first| tokio::spawn(renew_thousand(service.client.clone(), first, versions.clone())))
        .collect();
    let mut renewed = 0;
    for renewal in renewals {
        renewed += renewal.await.unwrap();
    }
    println!(
        "figure: {LOAD} held keys on {kind:?}: {LOAD} waits of 300 ms at once, {timed_out} timed \
         out, {over} told over, {unanswered} unanswered, in {} ms; 5 renewals of 1,000 at once, \
         {renewed} renewed, in {} ms",
        waited.as_millis(),
        started.elapsed().as_millis(),
    );
    assert_eq!((timed_out, over, renewed), (LOAD, 0, LOAD));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_holds_is_never_told_over_on_memory() {
    what_holds_is_never_told_over(Kind::Memory).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_holds_is_never_told_over_on_sqlite() {
    what_holds_is_never_told_over(Kind::Sqlite).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_holds_is_never_told_over_on_postgres() {
    what_holds_is_never_told_over(Kind::Postgres).await;
}
