//! What went wrong in other people's locks, elections and waiters, as reported in public, and must
//! not go wrong here. Each test names a report; what the other modules test already is not
//! repeated.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::check::{BRIEF, claim, force, millis, until_lapsed};
use crate::on_every_store;
use crate::reads::ODD_KEYS;
use crate::support::process::Process;
use crate::support::{Client, Kind, Service, eventually};
use crate::wire::{Wire, post};

/// Claims again and again until granted. A grant of which nothing was left when the store had made
/// it is not told as one, so it is passed over.
async fn claim_until_granted(client: &Client, key: &str, owner: &str, ttl_ms: i64) -> Value {
    loop {
        let reply = client.claim(key, owner, ttl_ms).await;
        match reply.outcome() {
            "claimed" => return reply.body["lease"].clone(),
            "held" | "unavailable" => {}
            _ => panic!("{reply:#?}"),
        }
    }
}

on_every_store! {
    /// A late holder's release frees its successor's lock, and a third one enters
    /// (`apache/superset#43462`, `nexspence/nexspence#223`).
    async fn a_late_release_does_not_free_the_successors_lease(service) {
        let first = service.claim("k", "a", BRIEF).await.expect("claimed").version();
        until_lapsed(&service, "k").await;
        let second = service.claim("k", "b", 60_000).await.expect("claimed").version();
        service.release("k", "a", first).await.expect_stale("superseded");
        service.renew("k", "b", second).await.expect("renewed");
        let third = service.claim("k", "c", 60_000).await.expect("held");
        assert_eq!(third.body["holder"]["version"], second);
        assert_eq!(service.state("k").await["version"], second);
    }

    /// One owner id per process, used as the lock's value: an old task of the process frees the
    /// lock of a new one (`teableio/teable#3238`).
    async fn an_owners_old_lease_does_not_pass_for_its_new_one(service) {
        let first = service.claim("k", "x", BRIEF).await.expect("claimed").version();
        until_lapsed(&service, "k").await;
        let second = service.claim("k", "x", 60_000).await.expect("claimed").version();
        assert!(second > first);
        service.release("k", "x", first).await.expect_stale("superseded");
        service.renew("k", "x", first).await.expect_stale("superseded");
        assert_eq!(service.state("k").await["version"], second);
    }

    /// Taking over an expired lock kept the old token and metadata, so the new holder could not
    /// release it (`elastic/kibana#220476`).
    async fn a_lease_taken_over_is_the_new_owners_in_every_member(service) {
        let body = |owner, metadata, ttl_ms| {
            json!({"key": "k", "owner_id": owner, "ttl_ms": ttl_ms, "metadata": {"of": metadata}})
        };
        let first = claim(&service, body("a", "a", BRIEF)).await.expect("claimed");
        until_lapsed(&service, "k").await;
        let second = claim(&service, body("b", "b", 60_000)).await.expect("claimed");
        let state = service.state("k").await;
        assert_eq!(state["owner_id"], "b");
        assert_eq!(state["metadata"], json!({"of": "b"}));
        assert_eq!(state["version"], second.version());
        let end_of_first = millis(&first.body["lease"]["expires_at"]);
        assert!(millis(&state["acquired_at"]) >= end_of_first);
        service.release("k", "b", second.version()).await.expect("released");
        service.claim("k", "c", 60_000).await.expect("claimed");
    }

    /// A refused attempt refreshed the time to live, so that polling kept a dead holder's lock
    /// alive for ever (`jplana/python-etcd#228`); and a contender's own shorter duration decided
    /// that the holder was stale (`npm/lockfile#30`, `kubernetes/kubernetes#114872`).
    async fn refused_claims_neither_extend_nor_shorten_the_holders_lease(service) {
        let granted = service.claim("k", "a", 1_000).await.expect("claimed");
        let expires_at = granted.body["lease"]["expires_at"].clone();
        let mut refusals = 0;
        let next = loop {
            let ttl_ms = if refusals % 2 == 0 { BRIEF } else { 60_000 };
            let reply = service.claim("k", "b", ttl_ms).await;
            if reply.outcome() == "claimed" {
                break reply;
            }
            assert_eq!(reply.expect("held").body["holder"]["expires_at"], expires_at);
            refusals += 1;
        };
        assert!(refusals > 3, "{refusals}");
        assert!(millis(&next.body["lease"]["acquired_at"]) >= millis(&expires_at));
    }

    /// Two winners when an expiry and a claim fall into the same tick of the clock
    /// (`lukas-krecan/ShedLock#702`, `lukas-krecan/ShedLock#1968`).
    async fn of_claims_that_race_with_an_expiry_one_wins(service) {
        let mut claims = JoinSet::new();
        let until = Instant::now() + Duration::from_millis(1_500);
        for n in 0..8 {
            let client = service.client.clone();
            claims.spawn(async move {
                let mut leases = Vec::new();
                while Instant::now() < until {
                    leases.push(claim_until_granted(&client, "k", &format!("o{n}"), 100).await);
                }
                leases
            });
        }
        let mut leases: Vec<_> = claims.join_all().await.into_iter().flatten().collect();
        leases.sort_by_key(|lease| lease["version"].as_i64().unwrap());
        assert!(leases.len() > 5, "{}", leases.len());
        for pair in leases.windows(2) {
            assert_ne!(pair[0]["version"], pair[1]["version"]);
            assert!(millis(&pair[1]["acquired_at"]) >= millis(&pair[0]["expires_at"]), "{pair:#?}");
        }
    }

    /// "Never expires" leaks as a time of −60 s (`nextcloud/files_lock#130`).
    async fn the_time_that_remains_is_never_negative(service) {
        service.claim("k", "a", 300).await.expect("claimed");
        loop {
            let state = service.state("k").await;
            if state["state"] == "free" {
                assert_eq!(state.get("expires_in_ms"), None);
                break;
            }
            assert!((0..=300).contains(&state["expires_in_ms"].as_i64().unwrap()), "{state}");
        }
    }

    /// The claim succeeded, its reply was lost, and the retry waits for its own ghost
    /// (`palantir/atlasdb#2455`, `hashicorp/consul#855`).
    async fn a_retry_after_a_lost_reply_finds_its_grant(service) {
        let body = json!({"key": "k", "owner_id": "a", "ttl_ms": 60_000,
                          "attempt_id": "0198f2c4-7d1e-7c3a-9b1f-3d2a6c5e4f00"});
        let mut wire = Wire::connect(&service.base).await;
        wire.send(post("/v1/leases/claim", b"", body.to_string().as_bytes())).await;
        eventually(|| async { service.state("k").await["state"] == "held" }).await;
        drop(wire);
        let again = claim(&service, body).await.expect("claimed");
        assert_eq!(again.body["repeated"], true);
        service.release("k", "a", again.version()).await.expect("released");
        service.claim("k", "b", 60_000).await.expect("claimed");
    }

    /// Keys that share a bucket block each other, or leak into each other
    /// (`spring-projects/spring-integration#11146`).
    async fn many_keys_of_one_owner_do_not_meet(service) {
        let claim_all = async |owner: &'static str, outcome: &str| {
            let mut claims = JoinSet::new();
            for n in 0..300 {
                let client = service.client.clone();
                claims.spawn(async move { (n, client.claim(&format!("k{n}"), owner, 60_000).await) });
            }
            let replies = claims.join_all().await.into_iter();
            replies.map(|(n, reply)| (n, reply.expect(outcome))).collect::<Vec<_>>()
        };
        let began = Instant::now();
        let mut granted = claim_all("a", "claimed").await;
        claim_all("b", "held").await;
        granted.sort_by_key(|(n, _)| std::cmp::Reverse(*n));
        let mut releases = JoinSet::new();
        for (n, reply) in granted {
            let client = service.client.clone();
            releases.spawn(async move {
                client.release(&format!("k{n}"), "a", reply.version()).await.expect("released")
            });
        }
        releases.join_all().await;
        claim_all("b", "claimed").await;
        assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
    }

    /// Work handed to a waiter whose client is gone, while others wait a full timeout
    /// (`camunda/camunda#2979`).
    async fn a_waiter_that_is_gone_is_not_served(service) {
        let held = service.claim("k", "a", 60_000).await.expect("claimed").version();
        for n in 1..=5 {
            let body = json!({"key": "k", "owner_id": "ghost", "ttl_ms": 60_000, "wait_ms": 50_000});
            let mut wire = Wire::connect(&service.base).await;
            wire.send(post("/v1/leases/claim", b"", body.to_string().as_bytes())).await;
            service.until_waiters(1).await;
            // An abrupt end, as of a process that was killed.
            wire.0.set_zero_linger().unwrap();
            drop(wire);
            service.until_waiters(0).await;
            assert_eq!(service.state("k").await["owner_id"], "a", "round {n}");
        }
        let body = json!({"key": "k", "owner_id": "c", "ttl_ms": 60_000, "wait_ms": 50_000});
        let client = service.client.clone();
        let living = tokio::spawn(async move { claim(&client, body).await });
        service.until_waiters(1).await;
        let sent = Instant::now();
        service.release("k", "a", held).await.expect("released");
        living.await.unwrap().expect("claimed");
        assert!(sent.elapsed() < Duration::from_secs(10));
        assert_eq!(service.state("k").await["owner_id"], "c");
    }

    /// A release at the very moment in which the first in line leaves: its turn must reach the
    /// next (`tokio-rs/tokio#4618`). A grant that was on its way to the leaver is taken back, or
    /// lapses if it had been handed to the connection.
    async fn a_release_that_meets_a_leaver_reaches_the_next_in_line(service) {
        for round in 0..15 {
            let held = service.claim("k", "a", 60_000).await.expect("claimed").version();
            let line = |owner: &'static str, ttl_ms: i64| {
                let client = service.client.clone();
                let body = json!({"key": "k", "owner_id": owner, "ttl_ms": ttl_ms,
                                  "wait_ms": 50_000});
                tokio::spawn(async move { claim(&client, body).await })
            };
            let leaver = line("leaver", 200);
            service.until_waiters(1).await;
            let next = line("next", 60_000);
            service.until_waiters(2).await;
            let release = service.release("k", "a", held);
            leaver.abort();
            release.await.expect("released");
            let Ok(granted) = timeout(Duration::from_secs(20), next).await else {
                panic!("round {round}: never served; {}", service.state("k").await);
            };
            let version = granted.unwrap().expect("claimed").version();
            service.release("k", "next", version).await.expect("released");
        }
    }

    /// Waits return in time while other keys are busy (`camunda/camunda#8389`).
    async fn waits_keep_their_time_while_other_keys_churn(service) {
        service.claim("k", "a", 60_000).await.expect("claimed");
        let mut churn = JoinSet::new();
        for n in 0..4 {
            let client = service.client.clone();
            churn.spawn(async move {
                let key = format!("busy{n}");
                loop {
                    let version = client.claim(&key, "a", 60_000).await.expect("claimed").version();
                    client.release(&key, "a", version).await.expect("released");
                }
            });
        }
        for wait_ms in [0, 1, 500] {
            let sent = Instant::now();
            service.wait("k", None, wait_ms).await.expect("timed_out");
            assert!(sent.elapsed() >= Duration::from_millis(wait_ms.unsigned_abs()));
            assert!(sent.elapsed() < Duration::from_secs(5), "{wait_ms}: {:?}", sent.elapsed());
        }
    }

    /// `%2F` decoded once too often or not at all, brackets and blanks taken for syntax
    /// (`tokio-rs/axum#2678`, `actix/actix-web#2726`): each key is the same lease in each call.
    async fn odd_keys_name_the_same_lease_in_every_call(service) {
        for key in ODD_KEYS {
            let version = service.claim(key, "a", 60_000).await.expect("claimed").version();
            assert_eq!(service.state(key).await["version"], version, "{key}");
            service.renew(key, "a", version).await.expect("renewed");
            service.wait(key, Some(version), 0).await.expect("timed_out");
            let body = json!({"key": key, "version": version});
            service.post("/v1/leases/verify", body).await.expect("current");
            force(&service, key, Some(version)).await.expect("released");
            assert_eq!(service.wait(key, Some(version), 0).await.reason(), "revoked", "{key}");
            service.release(key, "a", version).await.expect_stale("revoked");
        }
    }

    /// Numbers beyond 2^53 come back rounded from parsers that keep doubles
    /// (`serde-rs/json#1170`): versions stay below, so that each survives.
    async fn versions_survive_parsers_that_keep_doubles(service) {
        for n in 0..20 {
            let reply = service.claim(&format!("k{n}"), "a", 60_000).await.expect("claimed");
            let version = reply.version();
            #[expect(clippy::cast_possible_truncation, reason = "this is what such parsers do")]
            let through_a_double = version as f64 as i64;
            assert_eq!(through_a_double, version);
            assert!(reply.text.contains(&format!("\"version\":{version},")), "{}", reply.text);
        }
    }

    /// Requests given up in the middle of a transaction left it open on a pooled connection, and
    /// the next one got it (`transact-rs/sqlx#4385`, `windmill-labs/windmill#10823`).
    async fn requests_given_up_at_any_moment_leave_nothing_open(service) {
        let mut given_up = JoinSet::new();
        for n in 0..200_u64 {
            let client = service.client.clone();
            given_up.spawn(async move {
                let patience = Duration::from_micros(rand::random_range(0..8_000));
                let key = format!("k{}", n % 20);
                let _ = timeout(patience, client.claim(&key, &format!("o{n}"), 60_000)).await;
            });
            if n % 20 == 19 {
                while given_up.join_next().await.is_some() {}
            }
        }
        for n in 0..50 {
            let key = format!("other{n}");
            let version = service.claim(&key, "a", 60_000).await.expect("claimed").version();
            assert_eq!(service.state(&key).await["version"], version);
            service.release(&key, "a", version).await.expect("released");
        }
        let figures = service.get("/metrics").await.text;
        let failed = figures.lines().find(|line| line.starts_with("fencepost_store_failures_total"));
        assert_eq!(failed, None);
        if let Some(database) = &service.world().database {
            eventually(|| async {
                database.number(
                    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
                     AND state LIKE 'idle in transaction%'",
                ).await == 0
            }).await;
        }
        service.until_waiters(0).await;
    }
}

/// A wake-up sent before its waiter had registered was lost, with one thread as with many
/// (`tokio-rs/tokio#3757`, `octos-org/octos#927`).
#[tokio::test(flavor = "current_thread")]
async fn no_wake_up_is_lost_on_a_single_thread() {
    let service = Service::start(Kind::Memory).await;
    let began = Instant::now();
    for _ in 0..200 {
        let held = service.claim("k", "a", 60_000).await.expect("claimed").version();
        let (wait, released) =
            tokio::join!(service.wait("k", Some(held), 50_000), service.release("k", "a", held));
        assert_eq!(wait.expect("released").reason(), "released");
        released.expect("released");
    }
    assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
}

/// A signal that comes while the process gets ready must not end it half-way.
#[test]
fn a_process_told_to_end_as_soon_as_it_is_there_ends_in_order() {
    for _ in 0..20 {
        let mut process = Process::start("memory:", &["--log", "error"]);
        process.signal("TERM");
        let status = process.wait();
        assert!(status.success(), "{status}");
    }
}

/// A graceful shutdown hangs on its long polls (`tokio-rs/axum#991`, `moadim-io/daemon#342`), and
/// a second signal must not make it worse.
#[tokio::test(flavor = "multi_thread")]
async fn a_process_told_to_end_answers_its_waiters_and_ends() {
    for signals in [1, 2] {
        let mut process = Process::start("memory:", &["--log", "error"]);
        let held = process.claim("k", "a", 60_000).await.expect("claimed").version();
        let mut waits = JoinSet::new();
        for _ in 0..50 {
            let client = process.client.clone();
            waits.spawn(async move { client.wait("k", Some(held), 50_000).await });
        }
        process.until_waiters(50).await;
        let sent = Instant::now();
        for _ in 0..signals {
            process.signal("TERM");
        }
        for reply in waits.join_all().await {
            assert_eq!(reply.status, 503);
            assert_eq!(reply.expect("shutting_down").body["retryable"], true);
        }
        let status = tokio::task::spawn_blocking(move || process.wait()).await.unwrap();
        assert!(status.success(), "{status}");
        assert!(sent.elapsed() < Duration::from_secs(15), "{:?}", sent.elapsed());
    }
}
