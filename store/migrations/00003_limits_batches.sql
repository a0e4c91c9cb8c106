-- +goose NO TRANSACTION
-- +goose Up
-- Limits and campaigns.

CREATE TABLE IF NOT EXISTS t_global_quota (
  id               BIGINT UNSIGNED   NOT NULL AUTO_INCREMENT COMMENT 'the row',
  channel          TINYINT UNSIGNED  NOT NULL COMMENT 'numbered as in the queue tables',
  num              INT UNSIGNED      NOT NULL COMMENT 'tasks that may be accepted in any unit of time, of all callers together',
  unit             BIGINT UNSIGNED   NOT NULL COMMENT 'ms: 1000 a second, 60000 a minute, 86400000 a day',
  create_time      DATETIME(3)       NOT NULL COMMENT 'when it was made (UTC)',
  modify_time      DATETIME(3)       NOT NULL COMMENT 'when it was last changed (UTC)',
  PRIMARY KEY (id),
  UNIQUE KEY idx_limit (channel, unit)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin COMMENT='quotas of channels; edited by hand they hold within a second, too';

CREATE TABLE IF NOT EXISTS t_source_quota (
  id               BIGINT UNSIGNED   NOT NULL AUTO_INCREMENT COMMENT 'the row',
  source_id        VARCHAR(64)       NOT NULL COMMENT 'the caller',
  channel          TINYINT UNSIGNED  NOT NULL COMMENT 'numbered as in the queue tables',
  num              INT UNSIGNED      NOT NULL COMMENT 'tasks of the caller that may be accepted in any unit of time',
  unit             BIGINT UNSIGNED   NOT NULL COMMENT 'ms: 1000 a second, 60000 a minute, 86400000 a day',
  create_time      DATETIME(3)       NOT NULL COMMENT 'when it was made (UTC)',
  modify_time      DATETIME(3)       NOT NULL COMMENT 'when it was last changed (UTC)',
  PRIMARY KEY (id),
  UNIQUE KEY idx_limit (source_id, channel, unit)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin COMMENT='quotas of callers; edited by hand they hold within a second, too';

CREATE TABLE IF NOT EXISTS t_limit_count (
  limit_hash       BINARY(32)        NOT NULL COMMENT 'SHA-256 of what is counted: kind, caller, channel, category, receiver and unit',
  kind             ENUM('global','source','recipient') NOT NULL COMMENT 'which kind of limit',
  source_id        VARCHAR(64)       NOT NULL DEFAULT '' COMMENT 'the caller; empty: all',
  channel          TINYINT UNSIGNED  NOT NULL COMMENT 'numbered as in the queue tables',
  state            VARBINARY(512)    NOT NULL COMMENT 'times of the last acceptances, or counts of parts of the unit',
  version          BIGINT UNSIGNED   NOT NULL COMMENT 'counts changes: a change is made to the version that was read, or not at all',
  expire_time      DATETIME(3)       NOT NULL COMMENT 'what the row says is over after this instant (UTC)',
  PRIMARY KEY (limit_hash),
  KEY idx_expire (expire_time)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin COMMENT='how far limits are used up; changed in the transaction that accepts a message';

CREATE TABLE IF NOT EXISTS t_batch (
  source_id        VARCHAR(64)       NOT NULL COMMENT 'the caller',
  batch_id         VARCHAR(64)       NOT NULL COMMENT 'the campaign, as the caller names it',
  first_msg_id     BIGINT UNSIGNED   NOT NULL COMMENT 'its messages lie between this id',
  last_msg_id      BIGINT UNSIGNED   NOT NULL COMMENT 'and this one',
  create_time      DATETIME(3)       NOT NULL COMMENT 'when its first message was accepted (UTC)',
  PRIMARY KEY (source_id, batch_id),
  KEY idx_time (source_id, create_time)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin COMMENT='campaigns: messages with a batch_id';
