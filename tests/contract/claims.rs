//! Who gets a key, and what a claim is told.

use std::time::{Duration, Instant};

use fencepost::coordinator::CoordinatorOptions;
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::check::{BRIEF, claim, force, millis, no_nulls, problem, until_lapsed, wrong_members};
use crate::on_every_store;
use crate::support::{Client, Kind, Reply, Service, World, eventually};

/// Longer than what is told at once takes on a busy machine, and far shorter than any wait here:
/// who is overlooked is served at the end of its time, and that must not pass.
const PROMPT: Duration = Duration::from_secs(20);

const ATTEMPT: &str = "0198f2c4-7d1e-7c3a-9b1f-3d2a6c5e4f00";

fn attempt(key: &str, owner: &str, ttl_ms: i64) -> Value {
    json!({"key": key, "owner_id": owner, "ttl_ms": ttl_ms, "attempt_id": ATTEMPT})
}

fn with_metadata(key: &str, metadata: &Value) -> Value {
    json!({"key": key, "owner_id": "a", "ttl_ms": 30_000, "metadata": metadata})
}

/// A claim that waits, on its way.
fn claim_in_line(client: &Client, key: &str, owner: &str, wait_ms: i64) -> JoinHandle<Reply> {
    let body = json!({"key": key, "owner_id": owner, "ttl_ms": 30_000, "wait_ms": wait_ms});
    let client = client.clone();
    tokio::spawn(async move { claim(&client, body).await })
}

on_every_store! {
    async fn a_free_key_is_granted_and_a_held_one_is_not(service) {
        let first = service.claim("k", "a", 30_000).await.expect("claimed");
        assert_eq!(first.body["repeated"], false);
        assert_eq!(first.body["lease"]["ttl_ms"], 30_000);
        assert_eq!(first.body["lease"]["renew_after_ms"], 10_000);
        let second = service.claim("k", "b", 30_000).await.expect("held");
        assert_eq!(second.body["holder"]["owner_id"], "a");
        assert_eq!(second.body["holder"]["version"], first.version());
        assert!(second.body["retry_after_ms"].as_i64().unwrap() <= 1_000);
    }

    async fn an_owner_that_claims_again_is_told_that_the_key_is_held(service) {
        service.claim("k", "a", 30_000).await.expect("claimed");
        let again = service.claim("k", "a", 30_000).await.expect("held");
        assert_eq!(again.body["holder"]["owner_id"], "a");
    }

    async fn a_repeated_attempt_gets_the_same_grant_not_extended(service) {
        let claim = json!({"key": "k", "owner_id": "a", "ttl_ms": 30_000,
                           "attempt_id": "0198f2c4-7d1e-7c3a-9b1f-3d2a6c5e4f00"});
        let first = service.post("/v1/leases/claim", claim.clone()).await.expect("claimed");
        let again = service.post("/v1/leases/claim", claim.clone()).await.expect("claimed");
        assert_eq!(again.body["repeated"], true);
        assert_eq!(again.version(), first.version());
        assert_eq!(again.body["lease"]["expires_at"], first.body["lease"]["expires_at"]);
        service.release("k", "a", first.version()).await.expect("released");
        service.post("/v1/leases/claim", claim).await.expect_stale("released");
    }

    async fn a_grant_is_told_in_full_and_a_refusal_tells_of_the_holder(service) {
        let granted = service.claim("k", "a", 30_000).await.expect("claimed");
        no_nulls(&granted.body);
        let lease = granted.body["lease"].as_object().unwrap();
        let mut names: Vec<&str> = lease.keys().map(|name| &**name).collect();
        names.sort_unstable();
        assert_eq!(names, ["acquired_at", "expires_at", "expires_in_ms", "key", "owner_id",
                           "renew_after_ms", "ttl_ms", "version"]);
        assert_eq!(lease["key"], "k");
        assert_eq!(millis(&lease["expires_at"]) - millis(&lease["acquired_at"]), 30_000);
        let expires_in = lease["expires_in_ms"].as_i64().unwrap();
        assert!((1..=30_000).contains(&expires_in), "{expires_in}");
        for name in ["holder", "retry_after_ms", "recovered", "previous_version"] {
            assert_eq!(granted.body.get(name), None);
        }
        let refused = service.claim("k", "b", 30_000).await.expect("held");
        no_nulls(&refused.body);
        let holder = refused.body["holder"].as_object().unwrap();
        let mut names: Vec<&str> = holder.keys().map(|name| &**name).collect();
        names.sort_unstable();
        assert_eq!(names, ["acquired_at", "expires_at", "expires_in_ms", "owner_id", "version"]);
        for name in ["acquired_at", "expires_at", "version", "owner_id"] {
            assert_eq!(holder[name], lease[name], "{name}");
        }
        for name in ["lease", "repeated", "recovered", "previous_version"] {
            assert_eq!(refused.body.get(name), None);
        }
    }

    async fn of_many_claims_at_once_one_is_granted(service) {
        for round in 0..5 {
            let key = format!("k{round}");
            let claims = (0..20).map(|n| {
                let (client, key) = (service.client.clone(), key.clone());
                tokio::spawn(async move { client.claim(&key, &format!("o{n}"), 30_000).await })
            });
            let claims: Vec<_> = claims.collect();
            let mut granted = Vec::new();
            let mut named = Vec::new();
            for claim in claims {
                let reply = claim.await.unwrap();
                match reply.outcome() {
                    "claimed" => granted.push(reply.version()),
                    "held" => named.push(reply.body["holder"]["version"].as_i64().unwrap()),
                    _ => panic!("{reply:#?}"),
                }
            }
            assert_eq!(granted.len(), 1);
            assert!(named.iter().all(|version| *version == granted[0]));
        }
    }

    async fn keys_are_compared_byte_by_byte(service) {
        // A composed and a decomposed é, a no-break space, and so on: no two are one.
        let keys = ["k", "K", "k ", " k", "\u{e9}", "e\u{301}", "k\u{a0}", "k\u{200b}", "\u{feff}k"];
        for key in keys {
            let reply = service.claim(key, "a", 30_000).await.expect("claimed");
            assert_eq!(reply.body["lease"]["key"], key);
        }
        for key in keys {
            service.claim(key, "b", 30_000).await.expect("held");
        }
    }

    async fn owners_are_compared_byte_by_byte(service) {
        let granted = service.claim("k", "a", 30_000).await.expect("claimed");
        for owner in ["A", "a ", " a"] {
            service.renew("k", owner, granted.version()).await.expect_stale("unknown");
        }
    }

    async fn a_repeat_ignores_what_else_it_says(service) {
        let first = claim(&service, attempt("k", "a", 30_000)).await.expect("claimed");
        let mut other = attempt("k", "a", 60_000);
        other["metadata"] = json!({"pod": "b"});
        other["wait_ms"] = json!(20_000);
        let again = claim(&service, other).await.expect("claimed");
        assert_eq!(again.body["repeated"], true);
        for name in ["version", "ttl_ms", "acquired_at", "expires_at", "metadata"] {
            assert_eq!(again.body["lease"].get(name), first.body["lease"].get(name), "{name}");
        }
    }

    async fn a_repeat_gets_the_grant_as_it_was_renewed(service) {
        let first = claim(&service, attempt("k", "a", 1_000)).await.expect("claimed");
        let body = json!({"key": "k", "owner_id": "a", "version": first.version(), "ttl_ms": 60_000});
        let renewed = service.post("/v1/leases/renew", body).await.expect("renewed");
        let again = claim(&service, attempt("k", "a", 1_000)).await.expect("claimed");
        assert_eq!(again.body["lease"]["expires_at"], renewed.body["lease"]["expires_at"]);
        assert_eq!(again.version(), first.version());
    }

    async fn an_attempt_belongs_to_its_owner_and_key(service) {
        claim(&service, attempt("k", "a", 30_000)).await.expect("claimed");
        let other = claim(&service, attempt("k", "b", 30_000)).await.expect("held");
        assert_eq!(other.body["holder"]["owner_id"], "a");
        let elsewhere = claim(&service, attempt("l", "a", 30_000)).await.expect("claimed");
        assert_eq!(elsewhere.body["repeated"], false);
    }

    async fn another_attempt_of_the_owner_is_told_that_the_key_is_held(service) {
        claim(&service, attempt("k", "a", 30_000)).await.expect("claimed");
        let mut other = attempt("k", "a", 30_000);
        other["attempt_id"] = json!("0198f2c4-7d1e-7c3a-9b1f-3d2a6c5e4f01");
        claim(&service, other).await.expect("held");
    }

    async fn an_attempt_is_one_however_it_is_spelt(service) {
        let first = claim(&service, attempt("k", "a", 30_000)).await.expect("claimed");
        let mut upper = attempt("k", "a", 30_000);
        upper["attempt_id"] = json!(ATTEMPT.to_uppercase());
        let again = claim(&service, upper).await.expect("claimed");
        assert_eq!((again.version(), &again.body["repeated"]), (first.version(), &json!(true)));
    }

    async fn repeats_at_once_share_one_grant(service) {
        let repeats = (0..10).map(|_| {
            let client = service.client.clone();
            tokio::spawn(async move { claim(&client, attempt("k", "a", 30_000)).await })
        });
        let repeats: Vec<_> = repeats.collect();
        let mut versions = Vec::new();
        let mut first_grants = 0;
        for repeat in repeats {
            let reply = repeat.await.unwrap().expect("claimed");
            versions.push(reply.version());
            first_grants += usize::from(reply.body["repeated"] == false);
        }
        versions.dedup();
        assert_eq!((versions.len(), first_grants), (1, 1));
    }

    async fn a_late_repeat_of_an_expired_attempt_is_refused(service) {
        let first = claim(&service, attempt("k", "a", BRIEF)).await.expect("claimed");
        until_lapsed(&service, "k").await;
        for _ in 0..2 {
            let late = claim(&service, attempt("k", "a", 30_000)).await;
            problem(&late, 409, "stale_lease");
            let current = json!({"state": "free", "owner_id": "a", "version": first.version()});
            assert_eq!((late.reason(), &late.body["current"]), ("expired", &current));
        }
        assert_eq!(service.state("k").await["state"], "free");
    }

    async fn a_late_repeat_of_a_revoked_attempt_is_refused(service) {
        claim(&service, attempt("k", "a", 30_000)).await.expect("claimed");
        force(&service, "k", None).await.expect("released");
        claim(&service, attempt("k", "a", 30_000)).await.expect_stale("revoked");
        assert_eq!(service.state("k").await["state"], "free");
    }

    async fn a_late_repeat_is_refused_at_once_though_it_would_wait(service) {
        let first = claim(&service, attempt("k", "a", 30_000)).await.expect("claimed");
        service.release("k", "a", first.version()).await.expect("released");
        let mut late = attempt("k", "a", 30_000);
        late["wait_ms"] = json!(50_000);
        let sent = Instant::now();
        claim(&service, late).await.expect_stale("released");
        assert!(sent.elapsed() < PROMPT);
    }

    async fn a_key_remembers_an_attempt_until_its_next_grant(service) {
        let first = claim(&service, attempt("k", "a", 30_000)).await.expect("claimed");
        service.release("k", "a", first.version()).await.expect("released");
        claim(&service, attempt("k", "a", 30_000)).await.expect_stale("released");
        let second = service.claim("k", "b", 30_000).await.expect("claimed");
        claim(&service, attempt("k", "a", 30_000)).await.expect("held");
        service.release("k", "b", second.version()).await.expect("released");
        let third = claim(&service, attempt("k", "a", 30_000)).await.expect("claimed");
        assert_eq!(third.body["repeated"], false);
        assert!(third.version() > second.version());
    }

    async fn a_grant_after_an_expiry_recovers_it(service) {
        let first = service.claim("k", "a", BRIEF).await.expect("claimed");
        until_lapsed(&service, "k").await;
        let second = claim(&service, attempt("k", "b", 30_000)).await.expect("claimed");
        assert_eq!(second.body["recovered"], true);
        assert_eq!(second.body["previous_version"], first.version());
        let again = claim(&service, attempt("k", "b", 30_000)).await.expect("claimed");
        assert_eq!(again.body["repeated"], true);
        assert_eq!(again.body["recovered"], true);
        assert_eq!(again.body["previous_version"], first.version());
    }

    async fn a_grant_after_an_expiry_that_was_told_recovers_it(service) {
        let first = service.claim("k", "a", BRIEF).await.expect("claimed");
        service.until_expired("k", first.version()).await;
        let second = service.claim("k", "b", 30_000).await.expect("claimed");
        assert_eq!(second.body["recovered"], true);
        assert_eq!(second.body["previous_version"], first.version());
    }

    async fn a_grant_after_a_forced_release_recovers_it(service) {
        let first = service.claim("k", "a", 30_000).await.expect("claimed");
        force(&service, "k", None).await.expect("released");
        let second = service.claim("k", "b", 30_000).await.expect("claimed");
        assert_eq!(second.body["recovered"], true);
        assert_eq!(second.body["previous_version"], first.version());
    }

    async fn a_grant_after_a_release_recovers_nothing(service) {
        let first = service.claim("k", "a", BRIEF).await.expect("claimed");
        service.until_expired("k", first.version()).await;
        let second = service.claim("k", "b", 30_000).await.expect("claimed");
        service.release("k", "b", second.version()).await.expect("released");
        let third = service.claim("k", "c", 30_000).await.expect("claimed");
        assert_eq!(third.body.get("recovered"), None);
        assert_eq!(third.body.get("previous_version"), None);
    }

    /// What one is told of the lease, kept on one's own clock, is safe: nobody else gets the key
    /// before *send time + `elapsed_ms` + `expires_in_ms`*.
    async fn nobody_else_is_granted_the_key_before_the_safe_deadline(service) {
        let sent = Instant::now();
        let first = service.claim("k", "a", 300).await.expect("claimed");
        let safe_ms = first.body["elapsed_ms"].as_u64().unwrap()
            + first.body["lease"]["expires_in_ms"].as_u64().unwrap();
        let second = loop {
            let reply = service.claim("k", "b", 30_000).await;
            if reply.outcome() == "claimed" {
                break reply;
            }
            reply.expect("held");
        };
        assert!(sent.elapsed() >= Duration::from_millis(safe_ms));
        let (first, second) = (&first.body["lease"], &second.body["lease"]);
        assert!(millis(&second["acquired_at"]) >= millis(&first["expires_at"]));
    }

    async fn versions_rise_over_release_expiry_and_force(service) {
        let mut last = 0;
        for round in 0..6 {
            let ttl = if round % 3 == 1 { BRIEF } else { 30_000 };
            let version = service.claim("k", "a", ttl).await.expect("claimed").version();
            assert!(version > last && version < 1 << 53, "{version} after {last}");
            last = version;
            match round % 3 {
                0 => drop(service.release("k", "a", version).await.expect("released")),
                1 => service.until_expired("k", version).await,
                _ => drop(force(&service, "k", Some(version)).await.expect("released")),
            }
        }
    }

    async fn versions_rise_over_the_clean_up_of_idle_keys(service) {
        let (world, service) = forgetful(service.world().kind).await;
        let mut last = 0;
        for _ in 0..3 {
            let version = service.claim("k", "a", 30_000).await.expect("claimed").version();
            assert!(version > last);
            last = version;
            service.release("k", "a", version).await.expect("released");
            eventually(|| async { service.state("k").await.get("version").is_none() }).await;
        }
        drop(world);
    }

    async fn clean_up_spares_what_is_held(service) {
        let (world, service) = forgetful(service.world().kind).await;
        let version = service.claim("k", "a", 30_000).await.expect("claimed").version();
        let other = service.claim("idle", "a", 30_000).await.expect("claimed").version();
        service.release("idle", "a", other).await.expect("released");
        eventually(|| async { service.state("idle").await.get("version").is_none() }).await;
        service.claim("k", "b", 30_000).await.expect("held");
        service.renew("k", "a", version).await.expect("renewed");
        service.release("idle", "a", other).await.expect_stale("unknown");
        drop(world);
    }

    async fn leases_and_versions_outlive_a_restart(service) {
        let kind = service.world().kind;
        if kind == Kind::Memory {
            return;
        }
        let world = World::new(kind).await;
        let service = world.serve(CoordinatorOptions::default()).await;
        let held = claim(&service, attempt("held", "a", 60_000)).await.expect("claimed");
        let freed = service.claim("freed", "a", 60_000).await.expect("claimed").version();
        service.release("freed", "a", freed).await.expect("released");
        service.stop().await;
        let service = world.serve(CoordinatorOptions::default()).await;
        service.claim("held", "b", 60_000).await.expect("held");
        let again = claim(&service, attempt("held", "a", 60_000)).await.expect("claimed");
        assert_eq!(again.body["lease"]["expires_at"], held.body["lease"]["expires_at"]);
        service.release("freed", "a", freed).await.expect("released");
        assert!(service.claim("freed", "b", 60_000).await.expect("claimed").version() > freed);
    }

    async fn a_waiting_claim_on_a_free_key_is_granted_at_once(service) {
        let sent = Instant::now();
        claim_in_line(&service, "k", "a", 50_000).await.unwrap().expect("claimed");
        assert!(sent.elapsed() < PROMPT);
    }

    async fn a_waiting_claim_is_granted_on_release(service) {
        let first = service.claim("k", "a", 30_000).await.expect("claimed").version();
        let waiting = claim_in_line(&service, "k", "b", 50_000);
        service.until_waiters(1).await;
        let sent = Instant::now();
        service.release("k", "a", first).await.expect("released");
        let second = waiting.await.unwrap().expect("claimed");
        assert!(sent.elapsed() < PROMPT, "{:?}", sent.elapsed());
        assert!(second.version() > first);
        assert_eq!(second.body.get("recovered"), None);
    }

    async fn a_waiting_claim_is_granted_on_expiry(service) {
        let first = service.claim("k", "a", 500).await.expect("claimed");
        let second = claim_in_line(&service, "k", "b", 50_000).await.unwrap().expect("claimed");
        assert_eq!(second.body["previous_version"], first.version());
        let (first, second) = (&first.body["lease"], &second.body["lease"]);
        assert!(millis(&second["acquired_at"]) >= millis(&first["expires_at"]));
    }

    async fn a_waiting_claim_is_granted_on_a_forced_release(service) {
        let first = service.claim("k", "a", 60_000).await.expect("claimed").version();
        let waiting = claim_in_line(&service, "k", "b", 50_000);
        service.until_waiters(1).await;
        let sent = Instant::now();
        force(&service, "k", Some(first)).await.expect("released");
        assert_eq!(waiting.await.unwrap().expect("claimed").body["previous_version"], first);
        assert!(sent.elapsed() < PROMPT, "{:?}", sent.elapsed());
    }

    async fn waiting_claims_are_served_first_come_first_served(service) {
        let began = Instant::now();
        let mut version = service.claim("k", "o0", 60_000).await.expect("claimed").version();
        let mut line = Vec::new();
        for n in 1..=4 {
            line.push(claim_in_line(&service, "k", &format!("o{n}"), 50_000));
            service.until_waiters(n).await;
        }
        for (n, next) in line.into_iter().enumerate() {
            service.release("k", &format!("o{n}"), version).await.expect("released");
            version = next.await.unwrap().expect("claimed").version();
            assert_eq!(service.state("k").await["owner_id"], format!("o{}", n + 1));
        }
        assert!(began.elapsed() < PROMPT, "{:?}", began.elapsed());
    }

    async fn who_leaves_the_line_passes_its_turn_on(service) {
        let began = Instant::now();
        let first = service.claim("k", "a", 60_000).await.expect("claimed").version();
        let leavers: Vec<_> = ["b", "c"].map(|owner| (owner, 50_000)).into();
        let mut line = Vec::new();
        for (owner, wait_ms) in leavers {
            line.push(claim_in_line(&service, "k", owner, wait_ms));
            service.until_waiters(line.len()).await;
        }
        let last = claim_in_line(&service, "k", "d", 50_000);
        service.until_waiters(3).await;
        line.iter().for_each(JoinHandle::abort);
        service.until_waiters(1).await;
        service.release("k", "a", first).await.expect("released");
        last.await.unwrap().expect("claimed");
        assert_eq!(service.state("k").await["owner_id"], "d");
        assert!(began.elapsed() < PROMPT, "{:?}", began.elapsed());
    }

    async fn who_runs_out_of_time_passes_its_turn_on(service) {
        let began = Instant::now();
        let first = service.claim("k", "a", 60_000).await.expect("claimed").version();
        let hasty = claim_in_line(&service, "k", "b", 200);
        service.until_waiters(1).await;
        let patient = claim_in_line(&service, "k", "c", 50_000);
        hasty.await.unwrap().expect("held");
        service.until_waiters(1).await;
        service.release("k", "a", first).await.expect("released");
        patient.await.unwrap().expect("claimed");
        assert!(began.elapsed() < PROMPT, "{:?}", began.elapsed());
    }

    async fn a_waiting_claim_is_told_of_the_holder_when_its_time_is_out(service) {
        let first = service.claim("k", "a", 60_000).await.expect("claimed").version();
        let sent = Instant::now();
        let reply = claim_in_line(&service, "k", "b", 300).await.unwrap().expect("held");
        assert!(sent.elapsed() >= Duration::from_millis(300));
        assert!(sent.elapsed() < PROMPT);
        assert!(reply.body["elapsed_ms"].as_i64().unwrap() >= 300);
        assert_eq!(reply.body["holder"]["version"], first);
        assert!((0..=1_000).contains(&reply.body["retry_after_ms"].as_i64().unwrap()));
        assert_eq!(service.state("k").await["owner_id"], "a");
    }

    /// Behind others in line, too, the time is bounded.
    async fn a_claim_far_down_the_line_is_bounded_as_well(service) {
        service.claim("k", "a", 60_000).await.expect("claimed");
        let before = claim_in_line(&service, "k", "b", 50_000);
        service.until_waiters(1).await;
        let sent = Instant::now();
        claim_in_line(&service, "k", "c", 300).await.unwrap().expect("held");
        assert!(sent.elapsed() < PROMPT);
        before.abort();
    }

    /// A lease granted after queueing must not have run since the first attempt
    /// (`mike-marcacci/node-redlock#296`, `etcd-io/etcd#9921`).
    async fn the_ttl_of_a_waiting_claim_starts_at_the_grant(service) {
        let first = service.claim("k", "a", 1_000).await.expect("claimed");
        let body = json!({"key": "k", "owner_id": "b", "ttl_ms": 20_000, "wait_ms": 50_000});
        let second = claim(&service, body).await.expect("claimed");
        let lease = &second.body["lease"];
        assert_eq!(millis(&lease["expires_at"]) - millis(&lease["acquired_at"]), 20_000);
        assert!(millis(&lease["acquired_at"]) >= millis(&first.body["lease"]["expires_at"]));
        // Of the second that it stood in line, nothing is missing.
        assert!(lease["expires_in_ms"].as_i64().unwrap() > 19_000, "{lease}");
        assert!(second.body["elapsed_ms"].as_i64().unwrap() >= 500);
    }

    async fn a_repeat_of_the_holding_attempt_does_not_stand_in_line(service) {
        let first = claim(&service, attempt("k", "a", 60_000)).await.expect("claimed");
        let other = claim_in_line(&service, "k", "b", 50_000);
        service.until_waiters(1).await;
        let mut again = attempt("k", "a", 60_000);
        again["wait_ms"] = json!(50_000);
        let sent = Instant::now();
        let again = claim(&service, again).await.expect("claimed");
        assert!(sent.elapsed() < PROMPT);
        assert_eq!((again.version(), &again.body["repeated"]), (first.version(), &json!(true)));
        other.abort();
    }

    async fn two_waiting_requests_of_one_attempt_share_the_grant(service) {
        let first = service.claim("k", "a", 60_000).await.expect("claimed").version();
        let mut body = attempt("k", "b", 60_000);
        body["wait_ms"] = json!(50_000);
        let mut waiting = Vec::new();
        for n in 1..=2 {
            let (client, body) = (service.client.clone(), body.clone());
            waiting.push(tokio::spawn(async move { claim(&client, body).await }));
            service.until_waiters(n).await;
        }
        service.release("k", "a", first).await.expect("released");
        let sent = Instant::now();
        let second = waiting.remove(1).await.unwrap().expect("claimed");
        let first = waiting.remove(0).await.unwrap().expect("claimed");
        assert!(sent.elapsed() < PROMPT, "{:?}", sent.elapsed());
        assert_eq!(first.version(), second.version());
        assert_eq!((&first.body["repeated"], &second.body["repeated"]), (&json!(false), &json!(true)));
    }

    async fn metadata_is_shown_to_the_owner_and_to_everyone_else(service) {
        let metadata = json!({"pod": "worker-7", "": "empty name", "empty": ""});
        let granted = claim(&service, with_metadata("k", &metadata)).await.expect("claimed");
        assert_eq!(granted.body["lease"]["metadata"], metadata);
        let refused = service.claim("k", "b", 30_000).await.expect("held");
        assert_eq!(refused.body["holder"]["metadata"], metadata);
        assert_eq!(service.state("k").await["metadata"], metadata);
        let waited = service.wait("k", None, 0).await.expect("timed_out");
        assert_eq!(waited.body["holder"]["metadata"], metadata);
        let renewed = service.renew("k", "a", granted.version()).await.expect("renewed");
        assert_eq!(renewed.body["lease"]["metadata"], metadata);
        let list = service.get("/v1/leases").await;
        assert_eq!(list.body["items"][0]["metadata"], metadata);
    }

    async fn metadata_is_gone_with_its_lease(service) {
        let granted = claim(&service, with_metadata("k", &json!({"a": "b"}))).await;
        let version = granted.expect("claimed").version();
        service.release("k", "a", version).await.expect("released");
        assert_eq!(service.state("k").await.get("metadata"), None);
        let next = service.claim("k", "b", 30_000).await.expect("claimed");
        assert_eq!(next.body["lease"].get("metadata"), None);
        let refused = service.claim("k", "c", 30_000).await.expect("held");
        assert_eq!(refused.body["holder"].get("metadata"), None);
    }

    async fn metadata_keeps_every_character(service) {
        let metadata = json!({
            "nul": "a\u{0}b", "controls": "\t\r\n\u{1f}\u{7f}", "quotes": "\"'\\%_{}",
            "é": "é e\u{301} \u{2028}\u{feff}\u{10ffff} 😀", "number": "1E400", "json": "{\"a\":1}"
        });
        claim(&service, with_metadata("k", &metadata)).await.expect("claimed");
        assert_eq!(service.state("k").await["metadata"], metadata);
        claim(&service, with_metadata("empty", &json!({}))).await.expect("claimed");
        assert_eq!(service.state("empty").await["metadata"], json!({}));
    }

    async fn what_is_not_an_object_of_strings_is_no_metadata(service) {
        let wrong = [
            json!([]), json!("a"), json!(1), json!(true), json!({"a": 1}), json!({"a": null}),
            json!({"a": {}}), json!({"a": []}), json!({"a": "b", "c": false}),
        ];
        for metadata in wrong {
            let reply = claim(&service, with_metadata("k", &metadata)).await;
            assert_eq!(wrong_members(&reply), ["metadata"], "{metadata}");
        }
        let twice = r#"{"key":"k","owner_id":"a","ttl_ms":1000,"metadata":{"a":"b","a":"b"}}"#;
        assert_eq!(wrong_members(&service.post_raw("/v1/leases/claim", twice).await), ["metadata"]);
        assert_eq!(service.state("k").await, json!({"key": "k", "state": "free"}));
    }
}

/// A service that forgets idle keys as soon as it can.
async fn forgetful(kind: Kind) -> (World, Service) {
    let world = World::new(kind).await;
    let options = CoordinatorOptions {
        idle_key_retention: Duration::ZERO,
        cleanup_interval: Duration::from_millis(20),
        ..CoordinatorOptions::default()
    };
    let service = world.serve(options).await;
    (world, service)
}
