//! How rows are spelt in the columns of both SQL stores.

use uuid::Uuid;

use super::Row;
use crate::domain::ids::{Kind, OwnerId};
use crate::domain::lease::{Ending, Lease, Status};
use crate::domain::time::{Timestamp, Ttl};
use crate::domain::version::Version;

/// A row as the columns hold it, the key aside.
#[derive(Debug)]
pub(super) struct LeaseColumns {
    pub revision: i64,
    pub version: i64,
    pub status: i16,
    pub owner_id: String,
    pub attempt_id: Option<Uuid>,
    pub grant_id: i64,
    pub ttl_ms: i64,
    pub acquired_at: i64,
    pub expires_at: i64,
    pub recovered_from: Option<i64>,
    pub metadata: Option<String>,
}

/// The number that stands for a status.
pub(super) const fn status_number(status: Status) -> i16 {
    match status {
        Status::Held => 0,
        Status::Ended(Ending::Released) => 1,
        Status::Ended(Ending::Expired) => 2,
        Status::Ended(Ending::Revoked) => 3,
        Status::Ended(Ending::Undone) => 4,
    }
}

/// The status that a number stands for. One that this version does not know, written by a later
/// one, is some way of not being held.
const fn status(number: i16) -> Status {
    match number {
        0 => Status::Held,
        1 => Status::Ended(Ending::Released),
        3 => Status::Ended(Ending::Revoked),
        4 => Status::Ended(Ending::Undone),
        _ => Status::Ended(Ending::Expired),
    }
}

/// The number that stands for a machine.
pub(super) const fn kind_number(kind: Kind) -> i16 {
    kind as i16
}

impl From<LeaseColumns> for Row<Lease> {
    fn from(columns: LeaseColumns) -> Self {
        Self {
            revision: Version::from_stored(columns.revision),
            state: Lease {
                version: Version::from_stored(columns.version),
                status: status(columns.status),
                owner_id: OwnerId::from_stored(columns.owner_id),
                attempt_id: columns.attempt_id,
                grant_id: columns.grant_id,
                ttl: Ttl::from_stored(columns.ttl_ms),
                acquired_at: Timestamp::from_micros(columns.acquired_at),
                expires_at: Timestamp::from_micros(columns.expires_at),
                recovered_from: columns.recovered_from.map(Version::from_stored),
                metadata: columns.metadata,
            },
        }
    }
}
