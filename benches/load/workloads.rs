//! What the connections do. Every key is new unless the workload says otherwise.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::client::{Connection, Work, version};

/// Numbers that no run has used before.
#[derive(Clone, Default)]
pub(crate) struct Fresh(Arc<AtomicU64>);

impl Fresh {
    pub(crate) fn new() -> Self {
        let seed = std::time::UNIX_EPOCH.elapsed().unwrap().as_micros();
        Self(Arc::new(AtomicU64::new(u64::try_from(seed).unwrap() << 8)))
    }

    fn next(&self) -> u64 {
        self.0.fetch_add(1, Ordering::Relaxed)
    }

    /// Spread over the key space, as real keys are.
    pub(crate) fn key(&self) -> String {
        format!("{:016x}", self.next().wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }
}

pub(crate) fn expect(reply: (u16, &str), outcome: &str) -> Result<(), String> {
    let wanted = format!("{{\"outcome\":\"{outcome}\"");
    if reply.0 == 200 && reply.1.starts_with(&wanted) {
        return Ok(());
    }
    Err(format!("{} {}", reply.0, reply.1))
}

pub(crate) fn claim(key: &str) -> String {
    format!(r#"{{"key":"{key}","owner_id":"bench","ttl_ms":30000}}"#)
}

/// Claims of free keys, by any path that takes them.
#[derive(Clone)]
pub(crate) struct Claims(pub(crate) &'static str, pub(crate) Fresh);

impl Work for Claims {
    async fn turn(&mut self, connection: &mut Connection) -> Result<u64, String> {
        let body = claim(&self.1.key());
        expect(connection.ask(self.0, &body).await, "claimed").map(|()| 1)
    }
}

/// Claims of free keys among a number of known ones: most rows exist, and are free.
#[derive(Clone)]
pub(crate) struct Pairs(pub(crate) Fresh, pub(crate) u64);

impl Work for Pairs {
    async fn turn(&mut self, connection: &mut Connection) -> Result<u64, String> {
        let key = format!("pair-{}", self.0.next().wrapping_mul(7_919) % self.1);
        let (status, body) = connection.ask("/v1/leases/claim", &claim(&key)).await;
        if body.starts_with("{\"outcome\":\"held\"") {
            return Ok(1);
        }
        expect((status, body), "claimed")?;
        let version = version(body);
        let body = format!(r#"{{"key":"{key}","owner_id":"bench","version":{version}}}"#);
        expect(connection.ask("/v1/leases/release", &body).await, "released").map(|()| 2)
    }
}

/// Claims of one key that is held.
#[derive(Clone)]
pub(crate) struct Hot;

impl Work for Hot {
    async fn turn(&mut self, connection: &mut Connection) -> Result<u64, String> {
        let body = r#"{"key":"hot","owner_id":"bench","ttl_ms":3600000}"#;
        match connection.ask("/v1/leases/claim", body).await {
            (200, _) => Ok(1),
            (status, body) => Err(format!("{status} {body}")),
        }
    }
}

/// Renewals of a lease of one's own.
#[derive(Clone)]
pub(crate) struct Renewals(pub(crate) Fresh, pub(crate) Option<String>);

impl Work for Renewals {
    async fn turn(&mut self, connection: &mut Connection) -> Result<u64, String> {
        if self.1.is_none() {
            let key = self.0.key();
            let (status, body) = connection.ask("/v1/leases/claim", &claim(&key)).await;
            expect((status, body), "claimed")?;
            let version = version(body);
            self.1 = Some(format!(r#"{{"key":"{key}","owner_id":"bench","version":{version}}}"#));
        }
        let body = self.1.as_deref().unwrap_or_default();
        expect(connection.ask("/v1/leases/renew", body).await, "renewed").map(|()| 1)
    }
}

/// Renewals of leases that are in the table already, each connection anywhere in it: those that
/// `growth` makes.
#[derive(Clone)]
pub(crate) struct RenewalsAmong(pub(crate) u64);

impl Work for RenewalsAmong {
    async fn turn(&mut self, connection: &mut Connection) -> Result<u64, String> {
        let number = rand::random_range(1..=self.0);
        let body = format!(r#"{{"key":"held-{number}","owner_id":"bench","version":1}}"#);
        expect(connection.ask("/v1/leases/renew", &body).await, "renewed").map(|()| 1)
    }
}

/// Replays of executions that are completed already: those that `growth` makes.
#[derive(Clone)]
pub(crate) struct Replays(pub(crate) u64);

impl Work for Replays {
    async fn turn(&mut self, connection: &mut Connection) -> Result<u64, String> {
        let number = rand::random_range(1..=self.0);
        let body = format!(r#"{{"execution_id":"done-{number}","intent":"i","owner_id":"bench"}}"#);
        expect(connection.ask("/v1/executions/claim", &body).await, "completed").map(|()| 1)
    }
}

/// Executions, from claim to completion.
#[derive(Clone)]
pub(crate) struct Executions(pub(crate) Fresh);

impl Work for Executions {
    async fn turn(&mut self, connection: &mut Connection) -> Result<u64, String> {
        let id = self.0.key();
        let body = format!(r#"{{"execution_id":"{id}","intent":"i","owner_id":"bench"}}"#);
        let (status, body) = connection.ask("/v1/executions/claim", &body).await;
        expect((status, body), "claimed")?;
        let version = version(body);
        let body = format!(
            r#"{{"execution_id":"{id}","owner_id":"bench","version":{version},"result":{{"ok":true}}}}"#
        );
        expect(connection.ask("/v1/executions/complete", &body).await, "completed").map(|()| 2)
    }
}

/// Claims of a hundred executions at a time.
#[derive(Clone)]
pub(crate) struct ExecutionsMany(pub(crate) Fresh);

impl Work for ExecutionsMany {
    async fn turn(&mut self, connection: &mut Connection) -> Result<u64, String> {
        let items: Vec<String> = (0..100)
            .map(|_| {
                let id = self.0.key();
                format!(r#"{{"execution_id":"{id}","intent":"i","owner_id":"bench"}}"#)
            })
            .collect();
        let body = format!(r#"{{"items":[{}]}}"#, items.join(","));
        let (status, body) = connection.ask("/v1/executions/claim-many", &body).await;
        if status == 200 && body.matches("\"claimed\"").count() == 100 {
            return Ok(100);
        }
        Err(format!("{status} {body:.200}"))
    }
}

/// Stored responses: claim, completion, and one replay.
#[derive(Clone)]
pub(crate) struct Idempotency(pub(crate) Fresh);

impl Work for Idempotency {
    async fn turn(&mut self, connection: &mut Connection) -> Result<u64, String> {
        let key = self.0.key();
        let claim = format!(r#"{{"key":"{key}","fingerprint":"f","owner_id":"bench"}}"#);
        let (status, body) = connection.ask("/v1/idempotency/claim", &claim).await;
        expect((status, body), "claimed")?;
        let version = version(body);
        let body = format!(
            r#"{{"key":"{key}","owner_id":"bench","version":{version},"record":{{"status":201,"content_type":"application/json","body_base64":"eyJvayI6dHJ1ZX0="}}}}"#
        );
        expect(connection.ask("/v1/idempotency/complete", &body).await, "completed")?;
        expect(connection.ask("/v1/idempotency/claim", &claim).await, "completed").map(|()| 3)
    }
}

/// Ticks of a leader.
#[derive(Clone)]
pub(crate) struct Ticks(pub(crate) usize);

impl Work for Ticks {
    async fn turn(&mut self, connection: &mut Connection) -> Result<u64, String> {
        let body = format!(r#"{{"name":"leader-{0}","owner_id":"run-{0}"}}"#, self.0);
        expect(connection.ask("/v1/leaders/campaign", &body).await, "leading").map(|()| 1)
    }
}

/// Claims on etcd: a lease, then a put if absent under it.
#[derive(Clone)]
pub(crate) struct EtcdClaims(pub(crate) Fresh);

impl Work for EtcdClaims {
    async fn turn(&mut self, connection: &mut Connection) -> Result<u64, String> {
        use base64::Engine as _;
        let (status, body) = connection.ask("/v3/lease/grant", r#"{"TTL":30}"#).await;
        let start = body.find("\"ID\":\"").ok_or_else(|| format!("{status} {body}"))? + 6;
        let id = body[start..].split('"').next().unwrap_or_default().to_owned();
        let key = base64::engine::general_purpose::STANDARD.encode(self.0.key());
        let body = format!(
            r#"{{"compare":[{{"target":"CREATE","key":"{key}","createRevision":"0"}}],"success":[{{"requestPut":{{"key":"{key}","value":"YmVuY2g=","lease":"{id}"}}}}]}}"#
        );
        match connection.ask("/v3/kv/txn", &body).await {
            (200, body) if body.contains("\"succeeded\":true") => Ok(1),
            (status, body) => Err(format!("{status} {body}")),
        }
    }
}
