//! Who gets a key, and what a claim is told.

use serde_json::json;

use crate::on_every_store;

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
}
