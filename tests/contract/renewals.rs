//! Extending leases, one by one and many at once.

use serde_json::{Value, json};

use crate::check::{BRIEF, force, limit, millis, no_nulls, problem, until_lapsed, wrong_members};
use crate::on_every_store;
use crate::support::{Client, Reply};

async fn renew_for(client: &Client, key: &str, version: i64, ttl_ms: i64) -> Reply {
    let body = json!({"key": key, "owner_id": "a", "version": version, "ttl_ms": ttl_ms});
    client.post("/v1/leases/renew", body).await
}

async fn renew_many(client: &Client, items: Value) -> Reply {
    client.post("/v1/leases/renew-many", json!({"owner_id": "a", "items": items})).await
}

/// What a key holds, without what time alone changes.
async fn standing(client: &Client, key: &str) -> Value {
    let mut state = client.state(key).await;
    state.as_object_mut().unwrap().remove("expires_in_ms");
    state
}

on_every_store! {
    async fn a_renewal_moves_the_end_to_now_plus_the_leases_ttl(service) {
        let granted = service.claim("k", "a", 30_000).await.expect("claimed");
        let before = millis(&granted.body["lease"]["expires_at"]);
        // Some time must pass for the end to be seen moving.
        let other = service.claim("clock", "a", BRIEF).await.expect("claimed").version();
        service.until_expired("clock", other).await;
        let renewed = service.renew("k", "a", granted.version()).await.expect("renewed");
        no_nulls(&renewed.body);
        let lease = &renewed.body["lease"];
        assert!(millis(&lease["expires_at"]) >= before + BRIEF);
        assert_eq!(lease["ttl_ms"], 30_000);
        assert_eq!(lease["renew_after_ms"], 10_000);
        assert!(renewed.body["elapsed_ms"].as_i64().unwrap() >= 0);
        assert_eq!(service.state("k").await["expires_at"], lease["expires_at"]);
    }

    async fn a_renewal_changes_neither_version_nor_owner_nor_grant(service) {
        let body = json!({"key": "k", "owner_id": "a", "ttl_ms": 30_000, "metadata": {"a": "b"}});
        let granted = service.post("/v1/leases/claim", body).await.expect("claimed");
        let renewed = renew_for(&service, "k", granted.version(), 60_000).await.expect("renewed");
        for name in ["key", "owner_id", "version", "acquired_at", "metadata"] {
            assert_eq!(renewed.body["lease"][name], granted.body["lease"][name], "{name}");
        }
    }

    /// Renewing with less than what remains must not shorten the lease
    /// (`nextcloud/files_lock#130`).
    async fn a_renewal_never_shortens(service) {
        let granted = service.claim("k", "a", 60_000).await.expect("claimed");
        let renewed = renew_for(&service, "k", granted.version(), 1_000).await.expect("renewed");
        let lease = &renewed.body["lease"];
        assert_eq!(lease["expires_at"], granted.body["lease"]["expires_at"]);
        assert_eq!(lease["ttl_ms"], 1_000);
        assert_eq!(lease["renew_after_ms"], 333);
        let again = service.renew("k", "a", granted.version()).await.expect("renewed");
        assert_eq!(again.body["lease"]["expires_at"], lease["expires_at"]);
        assert_eq!(again.body["lease"]["ttl_ms"], 1_000);
    }

    async fn a_given_ttl_becomes_the_leases_own(service) {
        let granted = service.claim("k", "a", 10_000).await.expect("claimed");
        let longer = renew_for(&service, "k", granted.version(), 60_000).await.expect("renewed");
        assert_eq!(longer.body["lease"]["ttl_ms"], 60_000);
        let again = service.renew("k", "a", granted.version()).await.expect("renewed");
        assert_eq!(again.body["lease"]["ttl_ms"], 60_000);
        assert!(again.body["lease"]["expires_in_ms"].as_i64().unwrap() > 30_000);
        let before = millis(&longer.body["lease"]["expires_at"]);
        assert!(millis(&again.body["lease"]["expires_at"]) >= before);
    }

    async fn a_renewed_lease_outlives_its_first_ttl(service) {
        let granted = service.claim("k", "a", 500).await.expect("claimed").version();
        renew_for(&service, "k", granted, 30_000).await.expect("renewed");
        let other = service.claim("clock", "a", 600).await.expect("claimed").version();
        service.until_expired("clock", other).await;
        service.claim("k", "b", 30_000).await.expect("held");
        service.renew("k", "a", granted).await.expect("renewed");
    }

    /// A renewal after the end must not succeed as if the lease had never been lost
    /// (`leandromoreira/redlock-rb#36`).
    async fn an_expired_lease_cannot_be_renewed(service) {
        let granted = service.claim("k", "a", BRIEF).await.expect("claimed").version();
        until_lapsed(&service, "k").await;
        for _ in 0..2 {
            let refused = renew_for(&service, "k", granted, 30_000).await;
            problem(&refused, 409, "stale_lease");
            assert_eq!(refused.reason(), "expired");
            let current = json!({"state": "free", "owner_id": "a", "version": granted});
            assert_eq!(refused.body["current"], current);
        }
        assert_eq!(service.state("k").await["state"], "free");
        assert!(service.claim("k", "b", 30_000).await.expect("claimed").version() > granted);
    }

    async fn what_a_wait_told_to_be_over_cannot_be_renewed(service) {
        let granted = service.claim("k", "a", BRIEF).await.expect("claimed").version();
        service.until_expired("k", granted).await;
        service.renew("k", "a", granted).await.expect_stale("expired");
    }

    async fn a_superseded_lease_cannot_be_renewed(service) {
        let old = service.claim("k", "a", 30_000).await.expect("claimed").version();
        service.release("k", "a", old).await.expect("released");
        let new = service.claim("k", "b", 30_000).await.expect("claimed").version();
        let before = standing(&service, "k").await;
        let refused = service.renew("k", "a", old).await;
        problem(&refused, 409, "stale_lease");
        assert_eq!(refused.reason(), "superseded");
        let current = json!({"state": "held", "owner_id": "b", "version": new});
        assert_eq!(refused.body["current"], current);
        assert_eq!(standing(&service, "k").await, before);
    }

    async fn a_released_or_revoked_lease_cannot_be_renewed(service) {
        let released = service.claim("k", "a", 30_000).await.expect("claimed").version();
        service.release("k", "a", released).await.expect("released");
        service.renew("k", "a", released).await.expect_stale("released");
        let revoked = service.claim("k", "a", 30_000).await.expect("claimed").version();
        force(&service, "k", None).await.expect("released");
        service.renew("k", "a", revoked).await.expect_stale("revoked");
        assert_eq!(service.state("k").await["state"], "free");
    }

    async fn owner_and_version_must_both_match(service) {
        let granted = service.claim("k", "a", 30_000).await.expect("claimed").version();
        let before = standing(&service, "k").await;
        service.renew("k", "b", granted).await.expect_stale("unknown");
        service.renew("k", "a", granted + 1).await.expect_stale("unknown");
        service.renew("k", "a", (1 << 53) - 1).await.expect_stale("unknown");
        service.renew("k", "a", granted - 1).await.expect_stale("superseded");
        service.renew("k", "a", 1).await.expect_stale("superseded");
        assert_eq!(standing(&service, "k").await, before);
    }

    async fn a_key_that_nobody_claimed_cannot_be_renewed(service) {
        let refused = service.renew("k", "a", 7).await;
        problem(&refused, 409, "stale_lease");
        assert_eq!((refused.reason(), refused.body.get("current")), ("unknown", None));
        assert_eq!(service.state("k").await, json!({"key": "k", "state": "free"}));
    }

    async fn renewals_and_claims_at_once_lose_nothing(service) {
        let granted = service.claim("k", "a", 30_000).await.expect("claimed").version();
        let calls = (0..30).map(|n| {
            let client = service.client.clone();
            tokio::spawn(async move {
                if n % 2 == 0 {
                    client.renew("k", "a", granted).await.expect("renewed");
                } else {
                    client.claim("k", "b", 30_000).await.expect("held");
                }
            })
        });
        for call in calls.collect::<Vec<_>>() {
            call.await.unwrap();
        }
    }

    async fn each_of_many_is_renewed_or_refused_by_itself(service) {
        let expired = service.claim("expired", "a", BRIEF).await.expect("claimed").version();
        let held = service.claim("held", "a", 10_000).await.expect("claimed").version();
        let released = service.claim("released", "a", 10_000).await.expect("claimed").version();
        service.release("released", "a", released).await.expect("released");
        let revoked = service.claim("revoked", "a", 10_000).await.expect("claimed").version();
        force(&service, "revoked", None).await.expect("released");
        let old = service.claim("superseded", "a", 10_000).await.expect("claimed").version();
        service.release("superseded", "a", old).await.expect("released");
        service.claim("superseded", "a", 10_000).await.expect("claimed");
        let theirs = service.claim("theirs", "b", 10_000).await.expect("claimed").version();
        let last = service.claim("last", "a", 10_000).await.expect("claimed").version();
        until_lapsed(&service, "expired").await;

        let reply = service.post("/v1/leases/renew-many", json!({
            "owner_id": "a", "ttl_ms": 60_000, "items": [
                {"key": "expired", "version": expired}, {"key": "held", "version": held},
                {"key": "released", "version": released}, {"key": "revoked", "version": revoked},
                {"key": "superseded", "version": old}, {"key": "theirs", "version": theirs},
                {"key": "never", "version": 1}, {"key": "last", "version": last},
            ]
        })).await;
        assert_eq!(reply.status, 200, "{reply:#?}");
        no_nulls(&reply.body);
        assert!(reply.body["elapsed_ms"].as_i64().unwrap() >= 0);
        let results = reply.body["results"].as_array().unwrap();
        let stale = |key, reason| json!({"outcome": "stale_lease", "key": key, "reason": reason});
        for (result, key, reason) in [
            (&results[0], "expired", "expired"), (&results[2], "released", "released"),
            (&results[3], "revoked", "revoked"), (&results[4], "superseded", "superseded"),
            (&results[5], "theirs", "unknown"), (&results[6], "never", "unknown"),
        ] {
            assert_eq!(*result, stale(key, reason));
        }
        for (result, key, version) in [(&results[1], "held", held), (&results[7], "last", last)] {
            assert_eq!(result["outcome"], "renewed");
            assert_eq!(result["lease"]["key"], key);
            assert_eq!(result["lease"]["version"], version);
            assert_eq!(result["lease"]["ttl_ms"], 60_000);
            assert!(result["lease"]["expires_in_ms"].as_i64().unwrap() > 30_000);
        }
        assert_eq!(results.len(), 8);
        assert_eq!(service.state("theirs").await["version"], theirs);
    }

    async fn a_key_named_twice_gets_a_result_for_each(service) {
        let held = service.claim("k", "a", 30_000).await.expect("claimed").version();
        let items = json!([
            {"key": "k", "version": held}, {"key": "k", "version": held - 1},
            {"key": "k", "version": held},
        ]);
        let reply = renew_many(&service, items).await;
        let outcomes: Vec<&Value> =
            reply.body["results"].as_array().unwrap().iter().map(|item| &item["outcome"]).collect();
        assert_eq!(outcomes, ["renewed", "stale_lease", "renewed"]);
    }

    async fn as_many_as_allowed_are_renewed_and_one_more_is_refused(service) {
        let most = limit(&service, "many_items").await;
        let mut items = Vec::new();
        for chunk in (0..most).collect::<Vec<_>>().chunks(50) {
            let claims = chunk.iter().map(|n| {
                let (client, key) = (service.client.clone(), format!("k{n}"));
                tokio::spawn(async move { client.claim(&key, "a", 60_000).await })
            });
            for (claim, n) in claims.collect::<Vec<_>>().into_iter().zip(chunk) {
                let version = claim.await.unwrap().expect("claimed").version();
                items.push(json!({"key": format!("k{n}"), "version": version}));
            }
        }
        let reply = renew_many(&service, json!(items)).await;
        let results = reply.body["results"].as_array().unwrap();
        assert_eq!(results.len(), most);
        for (item, result) in items.iter().zip(results) {
            assert_eq!(result["outcome"], "renewed");
            assert_eq!(result["lease"]["key"], item["key"]);
            assert_eq!(result["lease"]["version"], item["version"]);
        }
        items.push(json!({"key": "one more", "version": 1}));
        assert_eq!(wrong_members(&renew_many(&service, json!(items)).await), ["items"]);
    }

    async fn items_that_are_wrong_are_named_and_nothing_is_renewed(service) {
        let held = service.claim("k", "a", 30_000).await.expect("claimed").version();
        let before = standing(&service, "k").await;
        let good = json!({"key": "k", "version": held});
        let with = |third: Value| json!([good, good, good, third]);
        for (items, names) in [
            (json!([]), vec!["items"]),
            (json!({}), vec!["items"]),
            (json!(null), vec!["items"]),
            (with(json!({"key": "k", "version": "7"})), vec!["items[3].version"]),
            (with(json!({"key": "k", "version": 0})), vec!["items[3].version"]),
            (with(json!({"key": "k"})), vec!["items[3].version"]),
            (with(json!({"key": "k", "version": null})), vec!["items[3].version"]),
            (with(json!({"key": "", "version": 1.5})), vec!["items[3].key", "items[3].version"]),
            (with(json!({"key": "k", "version": 1, "ttl_ms": 100})), vec!["items[3].ttl_ms"]),
            (with(json!({"key": "k", "version": 1, "owner_id": "a"})), vec!["items[3].owner_id"]),
            (with(json!([])), vec!["items[3]"]),
            (with(json!("k")), vec!["items[3]"]),
        ] {
            let reply = renew_many(&service, items.clone()).await;
            assert_eq!(wrong_members(&reply), names, "{items}");
        }
        let twice = format!(
            r#"{{"owner_id":"a","items":[{{"key":"k","version":{held}}},{{"key":"k","key":"k","version":{held}}}]}}"#
        );
        let reply = service.post_raw("/v1/leases/renew-many", twice).await;
        assert_eq!(wrong_members(&reply), ["items[1].key"]);
        assert_eq!(standing(&service, "k").await, before);
    }
}
