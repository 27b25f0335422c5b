//! Giving leases back, and freeing them by force.

use serde_json::{Value, json};

use crate::check::{BRIEF, force, limit, no_nulls, problem, until_lapsed, wrong_members};
use crate::on_every_store;
use crate::support::Client;

/// What a key holds, without what time alone changes.
async fn standing(client: &Client, key: &str) -> Value {
    let mut state = client.state(key).await;
    state.as_object_mut().unwrap().remove("expires_in_ms");
    state
}

on_every_store! {
    async fn a_released_key_is_free_at_once(service) {
        let first = service.claim("k", "a", 60_000).await.expect("claimed").version();
        let released = service.release("k", "a", first).await.expect("released");
        assert_eq!(released.body, json!({"outcome": "released"}));
        assert_eq!(service.state("k").await, json!({"key": "k", "state": "free", "version": first}));
        service.claim("k", "b", 60_000).await.expect("claimed");
    }

    async fn a_release_succeeds_again_until_the_next_grant(service) {
        let first = service.claim("k", "a", 60_000).await.expect("claimed").version();
        for _ in 0..3 {
            service.release("k", "a", first).await.expect("released");
        }
        let second = service.claim("k", "b", 60_000).await.expect("claimed").version();
        service.release("k", "a", first).await.expect_stale("superseded");
        service.release("k", "b", second).await.expect("released");
        service.release("k", "a", first).await.expect_stale("superseded");
    }

    async fn releases_at_once_all_succeed(service) {
        let first = service.claim("k", "a", 60_000).await.expect("claimed").version();
        let releases = (0..10).map(|_| {
            let client = service.client.clone();
            tokio::spawn(async move { client.release("k", "a", first).await })
        });
        for release in releases.collect::<Vec<_>>() {
            release.await.unwrap().expect("released");
        }
    }

    /// Giving back a lease that was lost must not look like a real release
    /// (`spring-projects/spring-integration#9291`).
    async fn an_expired_lease_cannot_be_released(service) {
        let first = service.claim("k", "a", BRIEF).await.expect("claimed").version();
        until_lapsed(&service, "k").await;
        for _ in 0..2 {
            let refused = service.release("k", "a", first).await;
            problem(&refused, 409, "stale_lease");
            assert_eq!(refused.reason(), "expired");
        }
        // Its loss stays visible to the next owner.
        let next = service.claim("k", "b", 60_000).await.expect("claimed");
        assert_eq!(next.body["previous_version"], first);
    }

    async fn a_revoked_lease_cannot_be_released(service) {
        let first = service.claim("k", "a", 60_000).await.expect("claimed").version();
        force(&service, "k", None).await.expect("released");
        service.release("k", "a", first).await.expect_stale("revoked");
        service.release("k", "a", first).await.expect_stale("revoked");
    }

    async fn only_the_exact_reference_releases(service) {
        let first = service.claim("k", "a", 60_000).await.expect("claimed").version();
        let before = standing(&service, "k").await;
        service.release("k", "b", first).await.expect_stale("unknown");
        service.release("k", "a", first + 1).await.expect_stale("unknown");
        service.release("k", "a", first - 1).await.expect_stale("superseded");
        service.release("K", "a", first).await.expect_stale("unknown");
        assert_eq!(standing(&service, "k").await, before);
        service.renew("k", "a", first).await.expect("renewed");
    }

    /// After a release, too, another owner's reference stays wrong.
    async fn a_repeated_release_must_name_the_owner_that_released(service) {
        let first = service.claim("k", "a", 60_000).await.expect("claimed").version();
        service.release("k", "a", first).await.expect("released");
        service.release("k", "b", first).await.expect_stale("unknown");
    }

    /// Releasing what was never held is an answer, not an internal error, and leaves no trace
    /// (`hangfire-postgres/Hangfire.PostgreSql#75`).
    async fn a_key_that_nobody_claimed_cannot_be_released(service) {
        for version in [1, (1 << 53) - 1] {
            service.release("k", "a", version).await.expect_stale("unknown");
        }
        for version in [0, -1, i64::MAX, i64::MIN] {
            let reply = service.release("k", "a", version).await;
            assert_eq!(wrong_members(&reply), ["version"], "{version}");
        }
        assert_eq!(service.state("k").await, json!({"key": "k", "state": "free"}));
        assert_eq!(service.get("/v1/leases").await.body, json!({"items": []}));
    }

    async fn a_forced_release_frees_the_key_and_names_the_version(service) {
        let first = service.claim("k", "a", 60_000).await.expect("claimed").version();
        let freed = force(&service, "k", None).await.expect("released");
        assert_eq!(freed.body, json!({"outcome": "released", "version": first}));
        assert_eq!(service.state("k").await["state"], "free");
        let next = service.claim("k", "b", 60_000).await.expect("claimed");
        assert!(next.version() > first);
    }

    async fn the_next_write_after_a_forced_release_is_told_of_it(service) {
        let first = service.claim("k", "a", 60_000).await.expect("claimed").version();
        force(&service, "k", Some(first)).await.expect("released");
        let refused = service.renew("k", "a", first).await;
        problem(&refused, 409, "stale_lease");
        assert_eq!(refused.reason(), "revoked");
        let current = json!({"state": "free", "owner_id": "a", "version": first});
        assert_eq!(refused.body["current"], current);
        service.claim("k", "b", 60_000).await.expect("claimed");
        service.renew("k", "a", first).await.expect_stale("superseded");
    }

    async fn a_forced_release_frees_the_named_version_only(service) {
        let first = service.claim("k", "a", 60_000).await.expect("claimed").version();
        service.release("k", "a", first).await.expect("released");
        let second = service.claim("k", "b", 60_000).await.expect("claimed").version();
        for version in [first, second + 1, 1, (1 << 53) - 1] {
            let refused = force(&service, "k", Some(version)).await.expect("not_held");
            assert_eq!(refused.body, json!({"outcome": "not_held"}));
        }
        service.renew("k", "b", second).await.expect("renewed");
        force(&service, "k", Some(second)).await.expect("released");
    }

    async fn there_is_nothing_to_force_on_a_free_key(service) {
        force(&service, "never", None).await.expect("not_held");
        force(&service, "never", Some(1)).await.expect("not_held");
        assert_eq!(service.state("never").await, json!({"key": "never", "state": "free"}));
        let released = service.claim("k", "a", 60_000).await.expect("claimed").version();
        service.release("k", "a", released).await.expect("released");
        force(&service, "k", None).await.expect("not_held");
        // A release stays a release.
        service.release("k", "a", released).await.expect("released");
        let lapsed = service.claim("k", "a", BRIEF).await.expect("claimed").version();
        until_lapsed(&service, "k").await;
        force(&service, "k", Some(lapsed)).await.expect("not_held");
        service.renew("k", "a", lapsed).await.expect_stale("expired");
        let forced = service.claim("k", "a", 60_000).await.expect("claimed").version();
        force(&service, "k", None).await.expect("released");
        force(&service, "k", Some(forced)).await.expect("not_held");
    }

    async fn a_forced_release_needs_a_reason(service) {
        let first = service.claim("k", "a", 60_000).await.expect("claimed").version();
        let most = limit(&service, "reason_bytes").await;
        for reason in [json!(null), json!(""), json!("r".repeat(most + 1)), json!(1), json!("a\nb")] {
            let body = json!({"key": "k", "reason": reason});
            let reply = service.post("/v1/leases/force-release", body).await;
            assert_eq!(wrong_members(&reply), ["reason"]);
        }
        let reply = service.post("/v1/leases/force-release", json!({"key": "k"})).await;
        assert_eq!(wrong_members(&reply), ["reason"]);
        service.renew("k", "a", first).await.expect("renewed");
        let body = json!({"key": "k", "reason": "é".repeat(most / 2)});
        let freed = service.post("/v1/leases/force-release", body).await.expect("released");
        no_nulls(&freed.body);
    }
}
