//! What a write rests on besides its row: the store takes it at the right time only, and a replica
//! that remembers too much is corrected by it.

use std::sync::Arc;
use std::time::Duration;

use fencepost::coordinator::{ClaimLease, Coordinator, CoordinatorOptions};
use fencepost::domain::ids::{Key, Kind as KeyKind, Namespace, Scope};
use fencepost::domain::lease::{ClaimOutcome, Lease, LeaseMachine, Reference, Status};
use fencepost::domain::time::{Timestamp, Ttl};
use fencepost::domain::version::Version;
use fencepost::engine::Hub;
use fencepost::store::postgres::PostgresStore;
use fencepost::store::{Moment, Row, Store, Stored, Write};

use crate::support::{Kind, World};

const LANE: usize = 0;

fn key(name: &str) -> Key {
    Key::new(KeyKind::Lease, &Namespace::default_namespace(), &Scope::none(), name)
}

fn write(name: &str, now: Timestamp) -> Write<Lease> {
    let revision = Version::next(None, 0, now).unwrap();
    let ttl = Ttl::from_millis(60_000).unwrap();
    let state = Lease {
        version: revision,
        status: Status::Held,
        owner_id: "a".parse().unwrap(),
        attempt_id: None,
        grant_id: 1,
        ttl,
        acquired_at: now,
        expires_at: now.after(ttl),
        recovered_from: None,
        metadata: None,
    };
    Write { key: key(name), expected: None, row: Row { revision, state } }
}

async fn is_accepted(store: &dyn Store<LeaseMachine>, moment: Moment, name: &str) -> bool {
    let writes = vec![write(name, moment.clock.now)];
    let stored = store.store(LANE, moment, writes.into()).await;
    match stored.as_slice() {
        [Stored::Accepted] => true,
        [Stored::NotAccepted] => false,
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_write_that_rests_on_another_time_than_the_store_has_is_not_accepted() {
    let world = World::new(Kind::Postgres).await;
    let (waker, metrics) = (Arc::new(Hub::default()) as _, Arc::default());
    let store = PostgresStore::open(&[world.url()], None, true, waker, metrics).await.unwrap();
    let store: &dyn Store<LeaseMachine> = &store;
    assert!(store.known(LANE).await.is_none(), "something is known before anything was loaded");
    let loaded = store.load(LANE, &[key("k")]).await.unwrap().moment;
    assert!(is_accepted(store, loaded, "loaded").await);
    let known = store.known(LANE).await.expect("nothing is known right after a load");
    assert!(is_accepted(store, known, "known").await);
    assert!(!is_accepted(store, known, "known").await, "twice");

    let late = Moment { until: Some(known.clock.now), ..known };
    assert!(!is_accepted(store, late, "late").await, "after its time");
    let mut early = known;
    early.clock.now = known.clock.now.plus(Duration::from_mins(1));
    early.until = Some(early.clock.now.plus(Duration::from_mins(1)));
    assert!(!is_accepted(store, early, "early").await, "before its time");
    assert!(store.load(LANE, &[key("late"), key("early")]).await.unwrap().rows == [None, None]);
}

/// Each remembers a key as it left it, while the other goes on with it.
#[tokio::test(flavor = "multi_thread")]
async fn a_replica_that_remembers_a_key_as_free_does_not_grant_what_another_holds() {
    let world = World::new(Kind::Postgres).await;
    let open =
        || async { Coordinator::open(&world.url(), CoordinatorOptions::default()).await.unwrap() };
    let (one, two) = (open().await, open().await);
    let name = "k".parse().unwrap();
    let wish =
        |owner: &str| ClaimLease::new(owner.parse().unwrap(), Ttl::from_millis(60_000).unwrap());
    let claim = async |replica: &Coordinator, owner: &str| {
        let reply = replica.leases().claim(&name, wish(owner)).await.unwrap();
        match reply.keep().0 {
            ClaimOutcome::Claimed { lease, .. } => Some(lease),
            ClaimOutcome::Held(_) => None,
            other => panic!("{other:?}"),
        }
    };
    let release = async |replica: &Coordinator, lease: &Lease| {
        let reference = Reference { owner_id: lease.owner_id.clone(), version: lease.version };
        replica.leases().release(&name, reference).await.unwrap();
    };
    let mut last = 0;
    for _ in 0..50 {
        for (holder, other) in [(&one, &two), (&two, &one)] {
            let lease = claim(holder, "holder").await.expect("not granted, though free");
            assert!(lease.version.get() > last);
            last = lease.version.get();
            assert_eq!(claim(other, "other").await, None);
            assert_eq!(claim(holder, "other").await, None);
            release(holder, &lease).await;
        }
    }
    // Never met by this one, and held.
    let lease = claim(&one, "holder").await.unwrap();
    let three = open().await;
    three.leases().claim(&"another".parse().unwrap(), wish("a")).await.unwrap().keep();
    assert_eq!(claim(&three, "other").await, None);
    release(&three, &lease).await;
    assert!(claim(&one, "other").await.is_some());
}
