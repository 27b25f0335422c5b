//! The follower's bounded wait: what ends it, and what it says.

use std::time::{Duration, Instant};

use serde_json::json;
use tokio::task::JoinHandle;

use crate::check::{BRIEF, force, no_nulls, problem, until_lapsed, wrong_members};
use crate::on_every_store;
use crate::support::{Client, Reply};

/// Longer than any answer that comes at once may take, shorter than any wait that is not.
const AT_ONCE: Duration = Duration::from_secs(10);

/// A wait on its way.
fn waiting(client: &Client, key: &str, version: Option<i64>, wait_ms: i64) -> JoinHandle<Reply> {
    let (client, key) = (client.clone(), key.to_owned());
    tokio::spawn(async move { client.wait(&key, version, wait_ms).await })
}

/// Fails unless a wait ended for this reason.
#[track_caller]
fn over(reply: &Reply, reason: &str) {
    assert_eq!((reply.outcome(), reply.reason()), ("released", reason), "{reply:#?}");
    no_nulls(&reply.body);
    assert!(reply.body["elapsed_ms"].as_i64().unwrap() >= 0);
    assert_eq!(reply.body.get("holder"), None);
}

on_every_store! {
    async fn a_wait_ends_with_the_release(service) {
        let held = service.claim("k", "a", 60_000).await.expect("claimed").version();
        let named = waiting(&service, "k", Some(held), 50_000);
        let unnamed = waiting(&service, "k", None, 50_000);
        service.until_waiters(2).await;
        service.release("k", "a", held).await.expect("released");
        over(&named.await.unwrap(), "released");
        over(&unnamed.await.unwrap(), "released");
        service.until_waiters(0).await;
        over(&service.wait("k", Some(held), 50_000).await, "released");
    }

    /// A lease that merely runs out wakes its waiters as a release does (`amd/gaia#3645`).
    async fn a_wait_ends_with_the_expiry_and_not_before(service) {
        let sent = Instant::now();
        let granted = service.claim("k", "a", 700).await.expect("claimed");
        let safe_ms = granted.body["elapsed_ms"].as_u64().unwrap()
            + granted.body["lease"]["expires_in_ms"].as_u64().unwrap();
        let named = waiting(&service, "k", Some(granted.version()), 50_000);
        let unnamed = waiting(&service, "k", None, 50_000);
        for wait in [named, unnamed] {
            over(&wait.await.unwrap(), "expired");
            assert!(sent.elapsed() >= Duration::from_millis(safe_ms));
            assert!(sent.elapsed() < AT_ONCE);
        }
        over(&service.wait("k", Some(granted.version()), 50_000).await, "expired");
    }

    async fn a_wait_ends_with_a_forced_release(service) {
        let held = service.claim("k", "a", 60_000).await.expect("claimed").version();
        let wait = waiting(&service, "k", Some(held), 50_000);
        service.until_waiters(1).await;
        let sent = Instant::now();
        force(&service, "k", None).await.expect("released");
        over(&wait.await.unwrap(), "revoked");
        assert!(sent.elapsed() < AT_ONCE);
        over(&service.wait("k", Some(held), 50_000).await, "revoked");
    }

    async fn a_version_below_the_newest_is_superseded(service) {
        let old = service.claim("k", "a", 60_000).await.expect("claimed").version();
        service.release("k", "a", old).await.expect("released");
        let new = service.claim("k", "b", 60_000).await.expect("claimed").version();
        let sent = Instant::now();
        over(&service.wait("k", Some(old), 50_000).await, "superseded");
        over(&service.wait("k", Some(1), 50_000).await, "superseded");
        service.release("k", "b", new).await.expect("released");
        over(&service.wait("k", Some(old), 50_000).await, "superseded");
        assert!(sent.elapsed() < AT_ONCE);
    }

    async fn a_version_above_the_newest_is_not_held(service) {
        let held = service.claim("k", "a", 60_000).await.expect("claimed").version();
        let sent = Instant::now();
        over(&service.wait("k", Some(held + 1), 50_000).await, "not_held");
        over(&service.wait("k", Some((1 << 53) - 1), 50_000).await, "not_held");
        assert!(sent.elapsed() < AT_ONCE);
    }

    async fn a_key_that_nobody_holds_is_not_held(service) {
        let sent = Instant::now();
        over(&service.wait("never", None, 50_000).await, "not_held");
        over(&service.wait("never", Some(7), 50_000).await, "not_held");
        let held = service.claim("k", "a", 60_000).await.expect("claimed").version();
        service.release("k", "a", held).await.expect("released");
        over(&service.wait("k", None, 50_000).await, "not_held");
        let lapsed = service.claim("l", "a", BRIEF).await.expect("claimed").version();
        until_lapsed(&service, "l").await;
        over(&service.wait("l", None, 50_000).await, "not_held");
        assert!(sent.elapsed() < AT_ONCE);
        service.renew("l", "a", lapsed).await.expect_stale("expired");
        assert_eq!(service.state("never").await, json!({"key": "never", "state": "free"}));
    }

    /// A wait follows one generation, and does not go on with the next one.
    async fn a_wait_ends_though_the_key_is_taken_again_at_once(service) {
        for version in [true, false] {
            let held = service.claim("k", "a", 60_000).await.expect("claimed").version();
            let wait = waiting(&service, "k", version.then_some(held), 50_000);
            service.until_waiters(1).await;
            let body = json!({"key": "k", "owner_id": "b", "ttl_ms": 60_000, "wait_ms": 50_000});
            let client = service.client.clone();
            let next = tokio::spawn(async move { client.post("/v1/leases/claim", body).await });
            service.until_waiters(2).await;
            service.release("k", "a", held).await.expect("released");
            let reply = wait.await.unwrap().expect("released");
            assert!(matches!(reply.reason(), "released" | "superseded"), "{reply:#?}");
            let next = next.await.unwrap().expect("claimed").version();
            service.release("k", "b", next).await.expect("released");
        }
    }

    async fn a_wait_that_is_out_of_time_tells_of_the_holder(service) {
        let granted = service.claim("k", "a", 60_000).await.expect("claimed");
        let sent = Instant::now();
        let reply = service.wait("k", Some(granted.version()), 300).await.expect("timed_out");
        assert!(sent.elapsed() >= Duration::from_millis(300));
        assert!(sent.elapsed() < AT_ONCE);
        assert!(reply.body["elapsed_ms"].as_i64().unwrap() >= 300);
        assert_eq!(reply.body.get("reason"), None);
        no_nulls(&reply.body);
        let holder = &reply.body["holder"];
        for name in ["owner_id", "version", "acquired_at", "expires_at"] {
            assert_eq!(holder[name], granted.body["lease"][name], "{name}");
        }
        assert!(holder["expires_in_ms"].as_i64().unwrap() > 0);
    }

    async fn a_wait_of_no_time_looks_once(service) {
        let held = service.claim("k", "a", 60_000).await.expect("claimed").version();
        let sent = Instant::now();
        service.wait("k", None, 0).await.expect("timed_out");
        service.wait("k", Some(held), 0).await.expect("timed_out");
        over(&service.wait("l", None, 0).await, "not_held");
        service.release("k", "a", held).await.expect("released");
        over(&service.wait("k", Some(held), 0).await, "released");
        assert!(sent.elapsed() < AT_ONCE);
    }

    /// A timeout below zero is refused, and does not loop (`camunda/camunda#8389`).
    async fn a_wait_must_have_a_length_in_bounds(service) {
        for wait_ms in [-1, i64::MIN, 50_001] {
            let reply = service.wait("k", None, wait_ms).await;
            assert_eq!(wrong_members(&reply), ["wait_ms"], "{wait_ms}");
        }
        over(&service.wait("k", None, 50_000).await, "not_held");
    }

    /// Waits learn of the new end of a renewed lease.
    async fn a_wait_goes_on_over_a_renewal(service) {
        let held = service.claim("k", "a", 500).await.expect("claimed").version();
        let wait = waiting(&service, "k", Some(held), 1_200);
        service.until_waiters(1).await;
        let body = json!({"key": "k", "owner_id": "a", "version": held, "ttl_ms": 60_000});
        service.post("/v1/leases/renew", body).await.expect("renewed");
        let reply = wait.await.unwrap().expect("timed_out");
        assert_eq!(reply.body["holder"]["version"], held);
        assert!(reply.body["holder"]["expires_in_ms"].as_i64().unwrap() > 30_000);
    }

    /// Each way of becoming free signals (`camunda/camunda-bpm-platform!299`): so many rounds
    /// would take far longer if the waits found out by looking again now and then.
    async fn waits_are_woken_and_do_not_poll(service) {
        let began = Instant::now();
        for round in 0..20 {
            let held = service.claim("k", "a", 60_000).await.expect("claimed").version();
            let wait = waiting(&service, "k", Some(held), 50_000);
            service.until_waiters(1).await;
            let reason = if round % 2 == 0 {
                service.release("k", "a", held).await.expect("released");
                "released"
            } else {
                force(&service, "k", None).await.expect("released");
                "revoked"
            };
            over(&wait.await.unwrap(), reason);
            service.until_waiters(0).await;
        }
        assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
    }

    async fn a_change_between_a_refused_claim_and_the_wait_is_not_missed(service) {
        let began = Instant::now();
        for _ in 0..10 {
            let held = service.claim("k", "a", 60_000).await.expect("claimed").version();
            let refused = service.claim("k", "b", 60_000).await.expect("held");
            let version = refused.body["holder"]["version"].as_i64();
            let (wait, released) = tokio::join!(
                service.wait("k", version, 50_000),
                service.release("k", "a", held)
            );
            over(&wait, "released");
            released.expect("released");
        }
        assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
    }

    async fn one_release_wakes_all_who_wait(service) {
        let held = service.claim("k", "a", 60_000).await.expect("claimed").version();
        let waits: Vec<_> =
            (0..40).map(|_| waiting(&service, "k", Some(held), 50_000)).collect();
        service.until_waiters(40).await;
        // They hold nothing that other calls need.
        service.claim("l", "b", 60_000).await.expect("claimed");
        let sent = Instant::now();
        service.release("k", "a", held).await.expect("released");
        for wait in waits {
            over(&wait.await.unwrap(), "released");
        }
        assert!(sent.elapsed() < AT_ONCE);
    }

    async fn who_gives_up_waiting_is_not_counted_any_longer(service) {
        service.claim("k", "a", 60_000).await.expect("claimed");
        let waits: Vec<_> = (0..10).map(|_| waiting(&service, "k", None, 50_000)).collect();
        service.until_waiters(10).await;
        waits.iter().for_each(JoinHandle::abort);
        service.until_waiters(0).await;
    }

    /// Wake-ups of one key must not reach the waiters of another that looks alike, is as long, or
    /// begins the same (`emilbayes/pg-ipc#2`,
    /// `GraphQLCollege/graphql-postgres-subscriptions#13`).
    async fn a_release_ends_the_waits_of_its_own_key_only(service) {
        let long = "p".repeat(200);
        let keys = [
            format!("{long}1"), format!("{long}2"), "cache:x".to_owned(), "cache_x".to_owned(),
            "CACHE:X".to_owned(), "cache:x ".to_owned(), "\"cache:x\"".to_owned(),
        ];
        let mut versions = Vec::new();
        for key in &keys {
            versions.push(service.claim(key, "a", 60_000).await.expect("claimed").version());
        }
        let released = [0, 2];
        let waits: Vec<_> = keys.iter().zip(&versions).enumerate().map(|(n, (key, version))| {
            let wait_ms = if released.contains(&n) { 50_000 } else { 1_500 };
            waiting(&service, key, Some(*version), wait_ms)
        }).collect();
        service.until_waiters(keys.len()).await;
        for n in released {
            service.release(&keys[n], "a", versions[n]).await.expect("released");
        }
        for (n, wait) in waits.into_iter().enumerate() {
            let reply = wait.await.unwrap();
            if released.contains(&n) {
                over(&reply, "released");
            } else {
                reply.expect("timed_out");
            }
        }
    }

    /// An operator's drain answers every waiting call, and grants nothing.
    async fn a_draining_replica_answers_every_call_that_waits(service) {
        let held = service.claim("k", "a", 60_000).await.expect("claimed").version();
        let waits: Vec<_> =
            (0..5).map(|_| waiting(&service, "k", Some(held), 50_000)).collect();
        let body = json!({"key": "k", "owner_id": "b", "ttl_ms": 60_000, "wait_ms": 50_000});
        let claims: Vec<_> = (0..5).map(|_| {
            let (client, body) = (service.client.clone(), body.clone());
            tokio::spawn(async move { client.post("/v1/leases/claim", body).await })
        }).collect();
        service.until_waiters(10).await;
        let sent = Instant::now();
        service.app.coordinator.drain();
        for call in waits.into_iter().chain(claims) {
            problem(&call.await.unwrap(), 503, "shutting_down");
        }
        assert!(sent.elapsed() < AT_ONCE);
        problem(&service.claim("l", "b", 60_000).await, 503, "shutting_down");
        problem(&service.wait("k", Some(held), 0).await, 503, "shutting_down");
        // What is held can still be kept and given back.
        service.renew("k", "a", held).await.expect("renewed");
        service.release("k", "a", held).await.expect("released");
        assert_eq!(service.state("l").await["state"], "free");
    }
}
