"""The Lua scripts of `RedisTokenStore`. Each runs atomically; all times are by Redis's clock.

The token's hash holds ``record``, ``fence`` (its fencing token), ``saved`` (the time), ``run`` (the server's run id),
``doubt`` (until when a restored token is not refreshed) and, while a refresh may be in progress, ``refresher`` and
``seen`` (when the refresher last gave a sign of life). The lock's hash holds ``owner`` and ``until``.
"""

from __future__ import annotations

from .connection import Script

__all__ = ["ACQUIRE", "LOAD", "RELEASE", "RENEW", "SAVE"]

# KEYS of every script: token, lock.
_COMMON = """
local token, lock = KEYS[1], KEYS[2]
local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000

local function text(seconds)
    return string.format('%.6f', seconds)
end

local function this_run()
    local info = redis.pcall('INFO', 'server')
    if type(info) == 'table' then
        error('the user needs +info: ' .. info.err)
    end
    return string.match(info, 'run_id:(%x+)'), tonumber(string.match(info, 'uptime_in_seconds:(%-?%d+)'))
end

local function is_connected(owner)
    return redis.call('PUBSUB', 'NUMSUB', lock .. ':' .. owner)[2] > 0
end

-- A fence is the ids of all authorizations so far and a counter of the last one's tokens: 'a1.b2:7'. It orders any two
-- tokens without a clock, even if Redis has lost one of them.
local function parts(fence)
    return string.match(fence, '^(.*):(%d+)$')
end

local function is_newer(fence, than)
    local path, count = parts(fence)
    local other, other_count = parts(than)
    if not (path and other) then
        return false
    end
    local last = string.match(other, '[^.]*$')
    if string.match(path, '[^.]*$') == last then
        return tonumber(count) > tonumber(other_count)
    end
    return string.find('.' .. path .. '.', '.' .. last .. '.', 1, true) ~= nil
end

-- If a worker knows a newer token than Redis, Redis has lost that token, and perhaps the mark of a refresh: restore it.
local function restore(fence, saved, record, doubt)
    local stored = redis.call('HGET', token, 'fence')
    if fence ~= '' and (not stored or is_newer(fence, stored)) then
        redis.call('HSET', token, 'fence', fence, 'saved', saved, 'record', record)
        redis.call('HSET', token, 'run', (this_run()), 'doubt', text(now + tonumber(doubt)))
        redis.call('HDEL', token, 'refresher', 'seen')
    end
end
"""
# ARGV: owner, lease until the first renewal, longest possible lease; known fence, saved, record, doubt.
# Takes the lock if its lease has expired, unless its holder may be refreshing and is still connected (paused).
# If the lock is not taken, returns the seconds left (negative: for how long its holder has been paused) and its owner.
ACQUIRE: Script = Script(
    _COMMON
    + """
restore(ARGV[4], ARGV[5], ARGV[6], ARGV[7])
local held = redis.call('HMGET', lock, 'owner', 'until')
if held[1] and held[1] ~= ARGV[1] then
    local left = tonumber(held[2]) - now
    -- A longer lease means that the clock was set back.
    local is_leased = left > 0 and left < tonumber(ARGV[3])
    if is_leased or (redis.call('HGET', token, 'refresher') == held[1] and is_connected(held[1])) then
        return {0, text(left), held[1]}
    end
end
redis.call('DEL', lock)
redis.call('HSET', lock, 'owner', ARGV[1], 'until', text(now + tonumber(ARGV[2])))
return {1, redis.call('HGET', token, 'fence') or '0'}
"""
)
# ARGV: owner of the lock, or '' outside it; grace; known fence, saved, record, doubt.
# Inside the lock a refresh follows, so the token is marked with its refresher. If the refresh token may have been used
# already, returns the seconds to wait instead, and the refresher if that is the reason.
LOAD: Script = Script(
    _COMMON
    + """
local owner, grace = ARGV[1], tonumber(ARGV[2])
if owner ~= '' and redis.call('HGET', lock, 'owner') ~= owner then
    return {0}
end
restore(ARGV[3], ARGV[4], ARGV[5], ARGV[6])
local fields = {'record', 'fence', 'saved', 'run', 'doubt', 'refresher', 'seen'}
local kept = redis.call('HMGET', token, unpack(fields))
local wait, refresher = 0, ''
if owner ~= '' and kept[1] then
    local run, uptime = this_run()
    -- The last writes of an earlier run may be lost. A negative uptime means that the clock was set back.
    if kept[4] and kept[4] ~= run and uptime >= 0 then
        wait = math.max(wait, grace - uptime)
    end
    if kept[5] then
        wait = math.max(wait, kept[5] - now)
    end
    if kept[6] and kept[6] ~= owner then
        refresher = kept[6]
        -- A time in the future was written before the clock was set back.
        if is_connected(refresher) or tonumber(kept[7]) > now then
            kept[7] = text(now)
            redis.call('HSET', token, 'seen', kept[7])
        end
        wait = math.max(wait, kept[7] + grace - now)
    end
    if wait <= 0 then
        redis.call('HSET', token, 'refresher', owner, 'seen', text(now))
    end
end
return {1, kept[1] or '', kept[2] or '0', kept[3] or '0', text(now), text(wait), refresher}
"""
)
# ARGV: fence of the token to replace, or '' outside the lock; '1' for a refresh; id for a new authorization; record;
# known fence, saved, record, doubt. Returns the new fence and the time, or nothing if a newer token is stored.
SAVE: Script = Script(
    _COMMON
    + """
restore(ARGV[5], ARGV[6], ARGV[7], ARGV[8])
local replaced, stored = ARGV[1], redis.call('HGET', token, 'fence')
if replaced ~= '' and stored and stored ~= replaced and not is_newer(replaced, stored) then
    return {}
end
local path, count = parts(replaced ~= '' and replaced or stored or '')
if not (path and ARGV[2] == '1') then
    path, count = (path and path .. '.' or '') .. ARGV[3], 0
end
-- Keep the last sixteen authorizations; an id has eight characters.
local fence = string.sub(path, -143) .. string.format(':%d', count + 1)
redis.call('HSET', token, 'fence', fence, 'saved', text(now), 'record', ARGV[4], 'run', (this_run()))
redis.call('HDEL', token, 'doubt', 'refresher', 'seen')
return {fence, text(now)}
"""
)
# ARGV: owner, lease. Returns the number of connections that show that the owner is alive; -1 if there is nothing to
# renew. A refresher that lost the lock still records its sign of life.
RENEW: Script = Script(
    _COMMON
    + """
local is_refresher = redis.call('HGET', token, 'refresher') == ARGV[1]
local is_owner = redis.call('HGET', lock, 'owner') == ARGV[1]
if is_refresher then
    redis.call('HSET', token, 'seen', text(now))
end
if is_owner then
    redis.call('HSET', lock, 'until', text(now + tonumber(ARGV[2])))
end
if not (is_refresher or is_owner) then
    return -1
end
return redis.call('PUBSUB', 'NUMSUB', lock .. ':' .. ARGV[1])[2]
"""
)
# ARGV: owner.
RELEASE: Script = Script(
    _COMMON
    + """
if redis.call('HGET', token, 'refresher') == ARGV[1] then
    redis.call('HDEL', token, 'refresher', 'seen')
end
if redis.call('HGET', lock, 'owner') == ARGV[1] then
    redis.call('DEL', lock)
end
return 1
"""
)
